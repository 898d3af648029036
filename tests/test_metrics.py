import math

import pytest
import torch

from posx import metrics


def test_loss_against_a_loop() -> None:
    logits = torch.randn(2, 3, 2, 5)
    digits = torch.randint(5, (2, 3, 2))
    total = 0.0
    for b in range(2):
        for t in range(3):
            for d in range(2):
                row = logits[b, t, d].tolist()
                total -= row[digits[b, t, d]] - math.log(sum(map(math.exp, row)))
    assert metrics.loss(logits, digits).item() == pytest.approx(total / 6, rel=1e-5)


def test_loss_of_half_precision_is_taken_in_float32() -> None:
    logits, digits = torch.randn(2, 3, 2, 5), torch.randint(5, (2, 3, 2))
    assert metrics.loss(logits.bfloat16(), digits).dtype == torch.float32
    assert metrics.loss(logits.double(), digits).dtype == torch.float64


def test_a_token_is_right_when_all_its_digits_are() -> None:
    digits = torch.tensor([[[1, 2], [3, 0]]])
    logits = torch.nn.functional.one_hot(torch.tensor([[[1, 2], [3, 4]]]), 5).float()
    assert metrics.right(logits, digits).tolist() == [[True, False]]


def test_the_tail_is_a_tenth_and_at_least_one() -> None:
    assert [metrics.tail(n) for n in (1, 9, 10, 29, 30)] == [1, 1, 1, 2, 3]


def test_entropy_of_uniform_and_certain_rows() -> None:
    p = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0]])
    assert metrics.entropy(p).tolist() == pytest.approx([math.log(4), 0])
