from typing import Any

import pytest
import torch
from test_conformance import subject

from posx.config import ModelConfig
from posx.conformance import Subject
from posx.model import Transformer
from posx.schemes.base import Nope
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
    embedded = model._embed(digits).std().item()
    assert embedded == pytest.approx(1, rel=0.15)  # 18 rows drawn: about 10 %


def test_answer_is_teacher_forced() -> None:
    """The logits of the answer come from the tokens before each of its tokens."""
    model = make()
    batch = Batch(torch.randint(VOCAB.size, (2, 9)), n_answer=4)
    logits, digits = model.answer(batch)
    whole = model(VOCAB.split(batch.tokens))
    assert torch.equal(digits, VOCAB.split(batch.answer))
    assert (logits - whole[:, 4:8]).abs().max() < 1e-5  # 8 against 9 tokens: another order of sums


def test_shared_scheme_is_one_object_and_stays_one() -> None:
    model = subject("t5").model()
    assert model.scheme(0) is model.scheme(1)
    assert [name for name in model.state_dict() if "scheme" in name] == ["schemes.0.weight"]
    model.replace_schemes(lambda scheme: Nope(scheme.site))
    assert model.scheme(0) is model.scheme(1)
    own = subject("shaw").model()
    assert own.scheme(0) is not own.scheme(1)
    assert [own.scheme(layer).site.layer for layer in (0, 1)] == [0, 1]


def test_subject_limits() -> None:
    assert Subject("nope", Nope, "").length(99) == 99
    assert subject("learned").length(99) == 16
