"""Loss and accuracy of one batch, token by token; tables aggregate them over sequences."""

import torch
import torch.nn.functional as F
from torch import Tensor


def loss(logits: Tensor, digits: Tensor) -> Tensor:
    """Cross entropy in nats a token, summed over the digits of a token, mean over tokens; taken in
    at least float32.

    logits: (B, n, digits, rows); digits: (B, n, digits) -> scalar.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact.flatten(0, 2), digits.flatten()) * digits.shape[-1]


def right(logits: Tensor, digits: Tensor) -> Tensor:
    """Which tokens are right: all digits of a token must be.

    logits: (B, n, digits, rows); digits: (B, n, digits) -> bool (B, n).
    """
    return (logits.argmax(-1) == digits).all(-1)


def tail(n: int) -> int:
    """Tokens in the last tenth of an answer of n, at least one."""
    return max(1, n // 10)


def first_error(correct: Tensor) -> Tensor:
    """Share of each answer that is right before the first mistake. bool (B, n) -> (B,)."""
    return correct.cumprod(1).sum(1) / correct.shape[1]


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats of each row of weights. (..., S) -> (...)."""
    return -torch.xlogy(p, p).sum(-1)
