"""Copy: repeat the payload.

BOS 7 2 9 SEP 7 2 9 EOS
          ^ the answer and EOS carry the loss
"""

import torch
from torch import Tensor

from posx.tasks.base import Task, Vocab, distinct

CHANCE_SEED, CHANCE_SEQUENCES = 0, 64


class Copy(Task):
    """The answer is the payload itself.

    With unique symbols a model can find the current symbol and read the next one (an induction
    head); with repeats the current symbol no longer says where it stands (Zhou et al. 2023,
    arXiv:2310.16028)."""

    name = "copy"

    def __init__(self, vocab: Vocab, unique: bool = True) -> None:
        super().__init__(vocab, unique)

    def payload(self, generator: torch.Generator, batch: int, n: int) -> Tensor:
        """x: (batch, n), drawn from the whole vocabulary."""
        if not self.unique:
            return torch.randint(self.vocab.size, (batch, n), generator=generator)
        return distinct(generator, n, torch.full((batch,), self.vocab.size))

    def solve(self, x: Tensor) -> Tensor:
        """(B, n) -> (B, n)."""
        return x

    def chance(self, length: int) -> float:
        """Accuracy of a model that knows which symbols are left but not their order.

        Unique symbols: the mean of 1/r over the r symbols left, H_n / n. With repeats it names the
        most frequent symbol left; the mean over a fixed sample."""
        n = self.items(length)
        if self.unique:
            return float((1 / torch.arange(1, n + 1, dtype=torch.float64)).mean())
        generator = torch.Generator().manual_seed(CHANCE_SEED)
        x = self.payload(generator, CHANCE_SEQUENCES, n)  # (B, n)
        return float(torch.tensor([_most_frequent_left(row) for row in x.tolist()]).mean())


def _most_frequent_left(row: list[int]) -> float:
    """Mean over suffixes of the share of their most frequent symbol."""
    counts: dict[int, int] = {}
    most, total = 0, 0.0
    for left, symbol in enumerate(reversed(row), start=1):
        counts[symbol] = counts.get(symbol, 0) + 1
        most = max(most, counts[symbol])
        total += most / left
    return total / len(row)
