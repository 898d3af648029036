from typing import Any

import pytest
import torch
from test_conformance import SCHEMES, subject
from torch.utils._python_dispatch import TorchDispatchMode

from posx.attention import DENSE, attend, choose_path
from posx.config import ModelConfig
from posx.conformance import Subject, layer
from posx.model import Transformer
from posx.schemes.base import Nope, Scheme
from posx.tasks.base import Batch, Vocab

CONFIG = {
    "n_layers": 2,
    "d_model": 24,
    "n_heads": 3,
    "d_head": 8,
    "d_ff": 40,
    "norm": "layernorm",
    "activation": "gelu",
    "head": "tied_projected",
    "init_std": 0.1,
}
VOCAB = Vocab(base=7, digits=2)


def make(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**(CONFIG | changes)), VOCAB, Nope, train_len=16)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor) and each.is_contiguous():  # views take no memory
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize("name", SCHEMES)
def test_no_n_by_n_tensor_at_8192_tokens(name: str) -> None:
    scheme = subject(name).scheme(train_len=8192)
    n = 8192
    with torch.no_grad(), Largest() as largest:
        given = layer(scheme, n)
        attend(*(scheme, given.q[:1], given.k[:1], given.v[:1], given.pos, given.pos, None))
    assert largest.numel < n * n / 8, f"a tensor of {largest.numel} elements"


def test_paths_follow_the_hooks() -> None:
    def path(name: str, queries: int, keys: int, training: bool) -> str:
        return choose_path(subject(name).scheme(), queries, keys, training)

    long = DENSE + 1
    assert path("rope", 9, 9, False) == "sdpa"
    assert path("rope", 1, 9, False) == "sdpa"
    assert path("rope", 4, 9, False) == "strips"  # a piece after cached keys
    assert path("alibi", 9, 9, False) == "strips"
    assert path("alibi", 9, 9, True) == "masked"
    assert path("alibi", long, long, True) == "folded"
    assert path("t5", 9, 9, True) == "dense"  # its bias needs a gradient
    assert path("t5", long, long, True) == "blocks"
    assert path("shaw", 9, 9, False) == "dense"
    assert path("shaw", long, long, False) == "blocks"
    assert path("window", long, long, False) == "banded"


def test_trained_bias_beyond_the_dense_limit_gets_the_same_gradient() -> None:
    """Blocks with recomputation against one dense block."""
    n = DENSE + 5
    grads = []
    for dense in (False, True):
        given = layer(subject("t5").scheme(), n)
        if dense:
            from posx.attention import block

            out = block(*given[:4], given.pos, given.pos, None)[0]
        else:
            out = attend(*given[:4], given.pos, given.pos, None)
        out.square().sum().backward()
        grads.append(next(given.scheme.parameters()).grad)
    scale = grads[1].abs().max()
    assert (grads[0] - grads[1]).abs().max() / scale < 1e-4  # sums of 10^6 float32 terms


@pytest.mark.parametrize("head", ["tied_projected", "tied", "untied"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_logits_have_a_row_for_every_digit_and_special(head: str, norm: str) -> None:
    model = make(head=head, norm=norm)
    digits = VOCAB.split(torch.randint(VOCAB.size, (2, 5)))
    assert model(digits).shape == (2, 5, 2, 10)
    # the top layer then has 3 queries instead of 5: another order of sums
    assert (model(digits, last=3) - model(digits)[:, 2:]).abs().max() < 1e-5


def test_initial_law() -> None:
    model = make(d_model=256, n_heads=4, d_head=64, d_ff=512)
    first = model.blocks[0]
    assert model.embedding.std().item() == pytest.approx(256**-0.5, rel=0.1)
    assert first.up.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert first.down.weight.std().item() == pytest.approx(0.1 / 2, rel=0.05)  # sqrt(2 * 2 layers)
    assert first.attention.out.weight.std().item() == pytest.approx(0.1 / 2, rel=0.05)
    digits = VOCAB.split(torch.randint(VOCAB.size, (3, 50)))
    assert model._embed(digits).std().item() == pytest.approx(
        1, rel=0.15
    )  # 18 rows drawn: about 10 %


def test_answer_is_teacher_forced() -> None:
    """The logits of the answer come from the tokens before each of its tokens."""
    model = make()
    batch = Batch(torch.randint(VOCAB.size, (2, 9)), n_answer=4)
    logits, digits = model.answer(batch)
    whole = model(VOCAB.split(batch.tokens))
    assert torch.equal(digits, VOCAB.split(batch.answer))
    assert (logits - whole[:, 4:8]).abs().max() < 1e-5  # 8 against 9 tokens: another order of sums


def test_nope_sees_order_through_the_mask_alone() -> None:
    """Without a mask attention commutes with permutations of the tokens; with it, it does not."""
    given = layer(Nope(subject("nope").site()), 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    scores = given.q @ given.k.transpose(-1, -2) / 8**0.5
    free = scores.softmax(-1) @ given.v
    moved = given.q[:, :, order] @ given.k[:, :, order].transpose(-1, -2) / 8**0.5
    assert (moved.softmax(-1) @ given.v[:, :, order] - free[:, :, order]).abs().max() < 1e-6
    causal = attend(*given[:4], given.pos, given.pos, None)
    permuted = attend(
        given.scheme, *(x[:, :, order] for x in given[1:4]), given.pos, given.pos, None
    )
    assert (permuted - causal[:, :, order]).abs().max() > 0.1


def test_shared_scheme_is_one_object_and_stays_one() -> None:
    model = subject("t5").model()
    assert model.scheme(0) is model.scheme(1)
    assert [name for name in model.state_dict() if "scheme" in name] == ["schemes.0.weight"]
    model.replace_schemes(lambda scheme: Nope(scheme.site))
    assert model.scheme(0) is model.scheme(1)
    own = subject("shaw").model()
    assert own.scheme(0) is not own.scheme(1)
    assert [own.scheme(layer).site.layer for layer in (0, 1)] == [0, 1]


class Sinks(Scheme):
    """The first two keys and a window of three: a band with sinks."""

    band = (2, 3)

    def mask(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i[:, None] - j < 3) | (j < 2)


def test_band_with_sinks_skips_keys_exactly() -> None:
    given = layer(Sinks(subject("nope").site()), 29)
    with torch.no_grad():
        got = attend(*given[:4], given.pos, given.pos, None)
        z = given.q @ given.k.transpose(-1, -2) / 8**0.5
        i, j = given.pos[:, None], given.pos
        visible = (j <= i) & ((i - j < 3) | (j < 2))
        expected = z.masked_fill(~visible, -torch.inf).softmax(-1) @ given.v
    assert (got - expected).abs().max() < 1e-5


def test_normalize_hook_replaces_softmax() -> None:
    class Uniform(Scheme):
        def normalize(self, z: torch.Tensor) -> torch.Tensor:
            seen = z.isfinite()
            return seen / seen.sum(-1, keepdim=True)

    given = layer(Uniform(subject("nope").site()), 7)
    out = attend(*given[:4], given.pos, given.pos, None)
    mean = given.v.cumsum(2) / torch.arange(1, 8)[:, None]
    assert (out - mean).abs().max() < 1e-6


def test_folded_path_equals_the_bias() -> None:
    scheme = subject("alibi").scheme()
    n = DENSE + 30
    given = layer(scheme, n)
    assert choose_path(scheme, n, n, training=True) == "folded"
    folded = attend(*given[:4], given.pos, given.pos, None)
    with torch.no_grad():
        strips = attend(*given[:4], given.pos, given.pos, None)
    # the bias of up to 1000 is rounded inside the dot product: 1e-5 (see Scheme.fold)
    assert (folded - strips).abs().max() < 5e-5


def test_subject_limits() -> None:
    assert Subject("nope", Nope, "").length(99) == 99
    assert subject("learned").length(99) == 16
