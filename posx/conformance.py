"""What every scheme must satisfy, ours or a third party's.

Each check takes a `Subject`, raises AssertionError with a sentence, and chooses by traits what to
ask. Nothing here knows pytest; tests run the same functions over the whole catalogue. Sizes are all
different, so that a wrong broadcast cannot pass.
"""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from posx.attention import DENSE, Cache, attend, block, choose_path, scores
from posx.config import ModelConfig
from posx.errors import UserError
from posx.model import Transformer
from posx.schemes.base import PLACES, Scheme, Site
from posx.tasks.base import Vocab

B, H, D, E = 2, 3, 8, 24
TRAIN_LEN = 16
MODEL = ModelConfig(
    n_layers=2, d_model=E, n_heads=H, d_head=D, d_ff=40, norm="layernorm", activation="gelu",
    head="tied_projected", init_std=0.2,
)  # fmt: skip
VOCAB = Vocab(base=7, digits=2)
# float32 sums of at most a few hundred terms of order 1 differ by a few 1e-6 between orders.
TOLERANCE = 1e-5
# A bias of up to 300 at 1100 tokens is rounded by 1.5e-5, and once more in a folded dot product.
LONG_TOLERANCE, FOLD_TOLERANCE = 2e-5, 5e-5


@dataclass(frozen=True)
class Subject:
    """A scheme under test: how to build it, and the documentation that it comes with."""

    name: str
    make: Callable[[Site], Scheme]
    card: str

    def site(self, train_len: int = TRAIN_LEN) -> Site:
        return Site(d_model=E, n_heads=H, d_head=D, train_len=train_len, n_layers=MODEL.n_layers)

    def scheme(self, train_len: int = TRAIN_LEN) -> Scheme:
        torch.manual_seed(1)
        return stirred(self.make(self.site(train_len)))

    def model(self, train_len: int = TRAIN_LEN) -> Transformer:
        torch.manual_seed(2)
        model = Transformer(MODEL, VOCAB, self.make, train_len)
        for scheme in schemes_of(model):
            stirred(scheme)
        return model.eval()

    def length(self, wanted: int) -> int:
        """`wanted`, or the scheme's limit where that is lower."""
        limit = self.scheme().max_len
        return wanted if limit is None else min(wanted, limit)


class Result(NamedTuple):
    """One line of the table of checks."""

    check: str
    passed: bool
    message: str


def run(subject: Subject) -> list[Result]:
    """All checks on one scheme, in order; a check that breaks counts as failed.

    On one thread: the tensors are so small that several only wait for one another, on a busy
    machine ten times as long as the work takes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_result(check, subject) for check in CHECKS]
    finally:
        torch.set_num_threads(threads)


def _result(check: FunctionType, subject: Subject) -> Result:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        check(subject)
    except Exception as error:
        return Result(name, False, str(error) or type(error).__name__)
    return Result(name, True, (inspect.getdoc(check) or "").splitlines()[0])


def stirred(scheme: Scheme) -> Scheme:
    """The scheme with noise on its parameters, so that one which starts at zero is tested too."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    return scheme


def schemes_of(model: Transformer) -> list[Scheme]:
    """Every scheme object of a model once."""
    return [model.scheme(layer) for layer in range(len(model.schemes))]


def tokens(n: int, seed: int = 4) -> Tensor:
    """Digits of random tokens: (B, n, digits)."""
    random = torch.Generator().manual_seed(seed)
    return VOCAB.split(torch.randint(VOCAB.size, (B, n), generator=random))


class Layer(NamedTuple):
    """Inputs of one attention layer after `prepare`."""

    scheme: Scheme
    q: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    state: Tensor | None


def positions(scheme: Scheme, n: int, random: torch.Generator | None = None) -> Tensor:
    """Position ids of n tokens, of which the first is special: (n,) or (B, n)."""
    symbols = torch.ones(B, n, dtype=torch.bool)
    symbols[:, 0] = False
    return scheme.positions(symbols, 0, random)


def layer(scheme: Scheme, n: int, shift: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    """A layer of n random tokens whose positions are all moved by `shift`."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(B, n, E, generator=random).to(dtype)
    q, k, v = (torch.randn(B, H, n, D, generator=random).to(dtype) for _ in range(3))
    pos = positions(scheme, n) + shift
    q, k, v, state = scheme.prepare(x, q, k, v, pos, None)
    return Layer(scheme, q, k, v, pos, state)


def close(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    error = (got.double() - expected.double()).abs().max().item()
    assert error <= tolerance, f"{what}: differs by {error:.1e}, allowed {tolerance:.0e}"


def rounding(given: Layer) -> float:
    """What the last bit of float32 is at the largest term of a folded dot product; 0 without a
    fold, and below the tolerances unless scores or distances are of some hundreds."""
    scheme = given.scheme
    if not scheme.overrides("fold"):
        return 0.0
    query, key = (part.detach().abs() for part in scheme.fold(given.pos, given.state))
    return torch.finfo(torch.float32).eps * (query * key).max().item() * D**-0.5


def by_rows(given: Layer, last: int | None = None) -> Tensor:
    """Attention one query at a time in float64: the definition, without any path.

    Of the last `last` queries, all when None -> (B, H, last, D).
    """
    scheme = copy.deepcopy(given.scheme).double()
    q, k, v = given.q.double(), given.k.double(), given.v.double()
    state = None if given.state is None else given.state.double()
    n, rows = q.shape[2], []
    for t in range(0 if last is None else max(0, n - last), n):
        here, seen = slice(t, t + 1), slice(0, t + 1)
        out, _ = block(
            scheme, q[:, :, here], k[:, :, seen], v[:, :, seen], given.pos[..., here],
            given.pos[..., seen], None if state is None else state[:, seen],
        )  # fmt: skip
        rows.append(out)
    return torch.cat(rows, 2)


# -- the checks ----------------------------------------------------------------------------------


def check_documented(subject: Subject) -> None:
    """a card, a docstring with a source, and a known place where position enters"""
    text = inspect.getdoc(type(subject.scheme())) or ""
    assert subject.card, "the yaml has no card: start it with `# Name: one sentence (source)`"
    found = re.search(r"arXiv:|doi:|https?://", text)
    assert found, "the docstring names no source (arXiv:..., doi:... or a link)"
    assert subject.scheme().enters in PLACES, f"`enters` is none of {', '.join(PLACES)}"


def check_shapes(subject: Subject) -> None:
    """every hook returns the shape of its contract"""
    scheme, n = subject.scheme(), 5
    pos = positions(scheme, n)
    assert pos.shape[-1] == n, f"positions: {tuple(pos.shape)}, expected (..., {n})"
    x = torch.zeros(B, n, E)
    assert scheme.embed(x, pos).shape == x.shape, "embed changes the shape"
    given = layer(scheme, n)
    out, p = block(*given[:4], given.pos, given.pos, given.state)
    assert p.shape == (B, H, n, n), f"weights are {tuple(p.shape)}, expected {(B, H, n, n)}"
    assert out.shape == (B, H, n, D), f"output is {tuple(out.shape)}, expected {(B, H, n, D)}"
    if given.state is not None:
        assert given.state.shape[:2] == (B, n), "state must be (B, T, ...)"
    if scheme.overrides("distance_bias"):
        d = torch.arange(7).view(7, 1)
        assert scheme.distance_bias(d).shape == (H, 7, 1), "distance_bias must be (H, *d.shape)"


def check_fold(subject: Subject) -> None:
    """`fold`, where there is one, is the bias of the exact form up to a constant a row"""
    scheme, n = subject.scheme().double(), subject.length(11)
    if not scheme.overrides("fold"):
        return
    exact = scheme.overrides("scores") or scheme.overrides("distance_bias")
    assert exact, "`fold` needs `scores` or `distance_bias`: evaluation never folds"
    given = layer(scheme, n, dtype=torch.float64)
    q, k, pos, state = given.q, given.k, given.pos, given.state
    extra_q, extra_k = scheme.fold(pos, state)
    for part in (extra_q, extra_k):
        fits = part.shape[0] in (1, B) and part.shape[1:] == (H, n, extra_q.shape[-1])
        assert fits, f"fold: {tuple(part.shape)}, expected (1 or {B}, {H}, {n}, F)"
    folded = extra_q @ extra_k.transpose(-1, -2) * D**-0.5  # (1 or B, H, n, n)
    plain = scores(Scheme(scheme.site), q, k, pos, pos, None)
    apart = folded - (scores(scheme, q, k, pos, pos, state) - plain)  # (B, H, n, n)
    apart = apart - apart.diagonal(dim1=-2, dim2=-1)[..., None]  # a row's own key at zero
    close(apart.tril(), torch.zeros(()), "fold minus bias", 1e-6)


def check_band(subject: Subject) -> None:
    """`band`, where there is one, holds every key that `mask` shows"""
    scheme = subject.scheme()
    if scheme.band is None:
        return
    assert scheme.overrides("mask"), "`band` needs `mask`: it hides nothing itself"
    sinks, window = scheme.band
    n = subject.length(sinks + window + 5)
    pos = positions(scheme, n)
    allowed = scheme.mask(pos[..., -1:], pos)  # (..., 1, S)
    assert allowed is not None, "`mask` returns nothing although there is a band"
    skipped = allowed[..., sinks : max(sinks, n - window)]
    assert not skipped.any(), f"band {scheme.band} leaves out keys that `mask` shows"


def check_paths_agree(subject: Subject) -> None:
    """every attention path equals a float64 loop over queries, in training and evaluation"""
    for n in (1, 2, 5, 37):
        given = layer(subject.scheme(), subject.length(n))
        expected = by_rows(given)
        arguments = (*given[:4], given.pos, given.pos, given.state)
        with torch.no_grad():
            close(attend(*arguments), expected, f"evaluation, {n} tokens")
        tolerance = max(TOLERANCE, rounding(given))
        close(attend(*arguments), expected, f"training, {n} tokens", tolerance)


def check_long_path(subject: Subject) -> None:
    """the paths beyond the dense limit equal a float64 loop, in training and evaluation"""
    n, last = subject.length(DENSE + 77), 64
    given = layer(subject.scheme(), n)
    expected = by_rows(given, last)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            got = attend(*given[:4], given.pos, given.pos, given.state)[:, :, -last:]
        path = choose_path(given.scheme, n, n, training)
        tolerance = max(FOLD_TOLERANCE, rounding(given)) if path == "folded" else LONG_TOLERANCE
        close(got, expected, f"last queries of {n} tokens, {path}", tolerance)


def check_drawn_positions(subject: Subject) -> None:
    """positions drawn in training follow the generator alone, and the model trains on them"""
    model, n = subject.model(), subject.length(TRAIN_LEN)
    if not model.scheme(0).overrides("positions"):
        return

    def random() -> torch.Generator:
        return torch.Generator().manual_seed(6)

    drawn, again = (positions(model.scheme(0), n, random()) for _ in range(2))
    assert drawn.shape[-1] == n, f"drawn positions: {tuple(drawn.shape)}, expected (..., {n})"
    assert torch.equal(drawn, again), "one generator state gives two draws"
    logits = model(tokens(n), generator=random())
    assert logits.isfinite().all(), "logits at drawn positions are not finite"


def check_causal(subject: Subject) -> None:
    """a later token never changes an earlier logit"""
    n, cut = subject.length(13), 6
    model = subject.model()
    before, after = tokens(n), tokens(n)
    after[:, cut:] = (after[:, cut:] + 1) % VOCAB.base
    with torch.no_grad():
        close(model(after)[:, :cut], model(before)[:, :cut], "earlier logits", 1e-6)


def check_prefix(subject: Subject) -> None:
    """a prefix gives the same logits alone, unless `length_dependent` says otherwise"""
    if subject.scheme().length_dependent:
        return
    n = subject.length(2 * TRAIN_LEN)
    model = subject.model()
    with torch.no_grad():
        whole, part = model(tokens(n)), model(tokens(n)[:, : n // 2])
    close(part, whole[:, : n // 2], f"first {n // 2} of {n} tokens")


def check_cached_decoding(subject: Subject) -> None:
    """decoding in pieces with a cache equals the full pass, unless `kv` says otherwise"""
    if not subject.scheme().kv:
        return
    n = subject.length(2 * TRAIN_LEN + 3)
    model, digits = subject.model(), tokens(n)
    caches = [Cache() for _ in model.layers]
    pieces, start = [], 0
    with torch.no_grad():
        for size in (4, 1, 3, *[1] * n):
            if start < n:
                pieces.append(model(digits[:, start : start + size], caches=caches))
                start += size
        close(torch.cat(pieces, 1), model(digits), "cached logits", 5e-5)


def check_shift(subject: Subject) -> None:
    """a `relative` scheme does not change when all positions move"""
    if not subject.scheme().relative:
        return
    n = subject.length(11)
    scheme = subject.scheme()
    with torch.no_grad():
        outs = []
        for shift in (0, 100):
            given = layer(scheme, n, shift)
            outs.append(block(*given[:4], given.pos, given.pos, given.state)[0])
    close(outs[1], outs[0], "moved by 100", 2e-5)  # float32 angles at 100 are off by 1e-5


def check_batch_rows_independent(subject: Subject) -> None:
    """a sequence gives the same logits alone and in a batch"""
    n = subject.length(9)
    model, digits = subject.model(), tokens(n)
    with torch.no_grad():
        close(model(digits[1:]), model(digits)[1:], "second row alone")


def check_deterministic(subject: Subject) -> None:
    """two evaluations are equal bit for bit, also after a longer and a shorter input"""
    model = subject.model()
    n = subject.length(8)
    with torch.no_grad():
        first = model(tokens(n))
        for other in (64, 7, 65):
            model(tokens(subject.length(other)))
        assert torch.equal(model(tokens(n)), first), "the second evaluation differs"


def check_gradients(subject: Subject) -> None:
    """the gradient is finite and reaches every parameter of the scheme"""
    model = subject.model()
    n = subject.length(2 * TRAIN_LEN)
    model(tokens(n)).square().mean().backward()
    for scheme in schemes_of(model):
        for name, parameter in scheme.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {name}"
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
            assert parameter.grad.abs().sum() > 0, f"the gradient of {name} is zero"


def check_half_precision(subject: Subject) -> None:
    """bfloat16 weights and autocast give finite logits near those of float32"""
    n = subject.length(3 * TRAIN_LEN)
    model, digits = subject.model(), tokens(n)
    with torch.no_grad():
        exact = model(digits)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(digits).float()
        half = copy.deepcopy(model).to(torch.bfloat16)(digits).float()
    scale = exact.abs().max().item()
    for got, what in ((half, "bfloat16"), (mixed, "autocast")):
        assert got.isfinite().all(), f"{what}: logits are not finite"
        close(got / scale, exact / scale, what, 0.1)  # 8 bits through 2 layers: about 3 %


def check_round_trips(subject: Subject) -> None:
    """state dict, deepcopy and pickle give the same model"""
    model, digits = subject.model(), tokens(subject.length(7))
    fresh = Transformer(MODEL, VOCAB, subject.make, TRAIN_LEN).eval()
    fresh.load_state_dict(model.state_dict())
    others = {
        "state dict": fresh,
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
    }
    with torch.no_grad():
        for name, other in others.items():
            assert torch.equal(other(digits), model(digits)), f"{name} changes the logits"


def check_long_lengths(subject: Subject) -> None:
    """1 to 8192 tokens compute, or the limit is refused with a sentence that names it"""
    scheme = subject.scheme()
    model = subject.model()
    for n in (1, 2, TRAIN_LEN, 2 * TRAIN_LEN):
        if scheme.max_len is not None and n > scheme.max_len:
            refusal = _refusal(model, n)
            assert refusal, f"{n} tokens pass although max_len is {scheme.max_len}"
            assert str(scheme.max_len) in refusal, f"the refusal does not name the limit: {refusal}"
            continue
        with torch.no_grad():
            assert model(tokens(n)).isfinite().all(), f"logits of {n} tokens are not finite"
    if scheme.max_len is None:
        with torch.no_grad():
            given, last = layer(scheme, 8192), 256
            out = attend(  # the last queries: those before them have nothing that is longer
                scheme, given.q[:, :, -last:], given.k, given.v, given.pos[..., -last:], given.pos,
                given.state,
            )  # fmt: skip
        assert out.isfinite().all(), "attention over 8192 tokens is not finite"
        # a bias of some thousands is rounded to 1e-4, a wrong one is off by 0.1 and more
        close(out[:, :, -2:], by_rows(given, 2), "last queries of 8192 tokens", 1e-3)


def _refusal(model: Transformer, n: int) -> str:
    """The sentence with which n tokens are refused; nothing where they pass."""
    try:
        model(tokens(n))
    except UserError as error:
        return str(error)
    return ""


CHECKS = (
    check_documented,
    check_shapes,
    check_fold,
    check_band,
    check_paths_agree,
    check_long_path,
    check_drawn_positions,
    check_causal,
    check_prefix,
    check_cached_decoding,
    check_shift,
    check_batch_rows_independent,
    check_deterministic,
    check_gradients,
    check_half_precision,
    check_round_trips,
    check_long_lengths,
)
