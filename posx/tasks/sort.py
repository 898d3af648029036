"""Sort: the payload in ascending order.

BOS 7 2 9 SEP 2 7 9 EOS
          ^ the answer and EOS carry the loss
"""

import math

import torch
from torch import Tensor

from posx.tasks.base import Task, Vocab, distinct

CHANCE_SEED, CHANCE_SEQUENCES = 0, 256


class Sort(Task):
    """The answer is the payload in ascending order of symbols.

    The payload is drawn from a random window of the vocabulary whose width is log-uniform between n
    and the vocabulary's size, so that small and large gaps between neighbours occur at every
    length; drawn from the whole vocabulary, a longer input would also be a denser one, and "next =
    last + 1" would pass for sorting."""

    name = "sort"

    def __init__(self, vocab: Vocab, unique: bool = True) -> None:
        super().__init__(vocab, unique)

    def payload(self, generator: torch.Generator, batch: int, n: int) -> Tensor:
        """x: (batch, n), each row from a window of its own."""
        width = self.widths(torch.rand(batch, generator=generator, dtype=torch.float64), n)  # (B,)
        spare = self.vocab.size - width + 1
        start = (torch.rand(batch, generator=generator, dtype=torch.float64) * spare).long()
        if self.unique:
            x = distinct(generator, n, width)  # (B, n)
        else:
            draw = torch.rand(batch, n, generator=generator, dtype=torch.float64)
            x = (draw * width[:, None]).long()
        return x + start[:, None]

    def widths(self, uniform: Tensor, n: int) -> Tensor:
        """Window widths, log-uniform in [n, vocab.size], from numbers uniform in [0, 1).

        (B,) -> (B,).
        """
        least = min(n, self.vocab.size)
        return (least * (uniform * math.log(self.vocab.size / least)).exp()).long()

    def solve(self, x: Tensor) -> Tensor:
        """(B, n) -> (B, n)."""
        return x.sort(1).values

    def chance(self, length: int) -> float:
        """The best of three answers that do not sort: a random symbol of those left (H_n / n), the
        last symbol + 1, and the last symbol again; the latter two as means over a fixed sample."""
        n = self.items(length)
        bag = float((1 / torch.arange(1, n + 1, dtype=torch.float64)).mean())
        generator = torch.Generator().manual_seed(CHANCE_SEED)
        y = self.solve(self.payload(generator, CHANCE_SEQUENCES, n))  # (B, n)
        step = y[:, 1:] - y[:, :-1]  # (B, n - 1); the first symbol has no last one
        successor = float((step == 1).sum()) / y.numel()
        repeat = float((step == 0).sum()) / y.numel()
        return max(bag, successor, repeat)
