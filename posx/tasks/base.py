"""What a task is: a rule from a prompt to an answer, sampled at any length.

Every sequence is `BOS x1..xn SEP y1..ym EOS`. A symbol is a number in 0 .. vocab.size-1, written to
the model as a fixed count of digits; the three special tokens follow the symbols.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posx.errors import UserError

BOS, SEP, EOS = 0, 1, 2
N_SPECIAL = 3


@dataclass(frozen=True)
class Vocab:
    """`base ** digits` symbols, written with `digits` digits each, and BOS, SEP, EOS.

    One digit is the ordinary vocabulary, one embedding row a symbol. With more, the model adds one
    embedding a digit and predicts the digits independently, so no matrix has the size of the
    vocabulary."""

    base: int
    digits: int = 1

    def __post_init__(self) -> None:
        if self.base < 2 or self.digits < 1:
            raise UserError(
                f"task.vocab: base {self.base} and digits {self.digits}; base must be at least 2, "
                "digits at least 1"
            )

    @property
    def size(self) -> int:
        """Number of symbols, special tokens not counted."""
        return self.base**self.digits

    @property
    def rows(self) -> int:
        """Embedding rows a digit: the digit values and the three special tokens."""
        return self.base + N_SPECIAL

    def special(self, which: int) -> int:
        """The token id of BOS, SEP or EOS."""
        return self.size + which

    def split(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) -> digit ids (B, T, digits), most significant first; a special token is
        row `base + which` in every digit."""
        place = self.base ** torch.arange(self.digits - 1, -1, -1, device=tokens.device)
        digits = tokens[..., None] // place % self.base  # (B, T, digits)
        special = tokens - self.size + self.base  # (B, T)
        return torch.where(tokens[..., None] >= self.size, special[..., None], digits)


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length: no padding anywhere. tokens: (B, T); the answer and EOS are the
    last `n_answer` tokens."""

    tokens: Tensor
    n_answer: int

    @property
    def prompt(self) -> Tensor:
        """BOS x SEP: (B, T - n_answer)."""
        return self.tokens[:, : -self.n_answer]

    @property
    def answer(self) -> Tensor:
        """y EOS: (B, n_answer)."""
        return self.tokens[:, -self.n_answer :]


class Task(ABC):
    """A sequence-to-sequence rule. Subclasses draw the payload and say what the answer is."""

    name: ClassVar[str]

    def __init__(self, vocab: Vocab, unique: bool) -> None:
        self.vocab = vocab
        self.unique = unique

    def items(self, length: int) -> int:
        """Payload symbols n of a sequence of at most `length` tokens: 2n + 3 <= length."""
        return (length - N_SPECIAL) // 2

    def length(self, n: int) -> int:
        """Tokens of a sequence of n payload symbols."""
        return 2 * n + N_SPECIAL

    def can_make(self, length: int) -> bool:
        n = self.items(length)
        return n >= 1 and not (self.unique and n > self.vocab.size)

    def check_length(self, length: int) -> None:
        """Refuse a length that cannot be made.

        Raises:
            UserError: too short for one symbol, or more unique symbols than the vocabulary has.
        """
        n = self.items(length)
        if self.can_make(length):
            return
        if n < 1:
            raise UserError(f"length {length} is too short for task {self.name}: at least 5 tokens")
        raise UserError(
            f"length {length} needs {n} unique symbols, task {self.name} has {self.vocab.size}: "
            f"use lengths up to {self.length(self.vocab.size)}, a larger task.vocab.base, or "
            "task.unique=false"
        )

    @abstractmethod
    def payload(self, generator: torch.Generator, batch: int, n: int) -> Tensor:
        """Draw x: (batch, n) symbols. Pure: the same generator state gives the same payload."""

    @abstractmethod
    def solve(self, x: Tensor) -> Tensor:
        """The right answer, the task's oracle: x (B, n) -> y (B, n)."""

    @abstractmethod
    def chance(self, length: int) -> float:
        """Token accuracy of the best answer that ignores what the task is about; its docstring says
        which."""

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Batch:
        """Draw `batch` sequences of `items(length)` symbols."""
        n = self.items(length)
        x = self.payload(generator, batch, n)  # (B, n)
        y = self.solve(x)  # (B, n)
        bos, sep, eos = (
            torch.full((batch, 1), self.vocab.special(which)) for which in (BOS, SEP, EOS)
        )
        return Batch(torch.cat([bos, x, sep, y, eos], 1), n_answer=y.shape[1] + 1)


def distinct(generator: torch.Generator, n: int, width: Tensor) -> Tensor:
    """Draw n different numbers of 0 .. width-1 in random order, every ordered choice equally
    likely.

    width: (B,) with width >= n -> (B, n). Rows far from full are filled by redrawing repeats, which
    treats all numbers alike and so stays uniform; nearly full rows take the smallest n of `width`
    random keys.
    """
    out = torch.empty(len(width), n, dtype=torch.long)
    dense = width < 4 * n
    if dense.any():
        columns = torch.arange(int(width[dense].max()))
        keys = torch.rand(int(dense.sum()), len(columns), generator=generator)  # (B', W)
        keys.masked_fill_(columns >= width[dense, None], 2.0)  # behind every real key
        out[dense] = keys.argsort(1)[:, :n]
    sparse = ~dense
    if sparse.any():
        limit = width[sparse, None]
        draw = _below(generator, limit, n)  # (B'', n)
        while (repeats := _repeats(draw)).any():
            draw = torch.where(repeats, _below(generator, limit, n), draw)
        out[sparse] = draw
    return out


def _below(generator: torch.Generator, limit: Tensor, n: int) -> Tensor:
    """Uniform numbers of 0 .. limit-1. limit: (B, 1) -> (B, n). Exact: limit is far below 2^53."""
    draw = torch.rand(len(limit), n, generator=generator, dtype=torch.float64)
    return (draw * limit).long()


def _repeats(x: Tensor) -> Tensor:
    """Which entries equal an earlier one of their row. (B, n) -> bool (B, n)."""
    ordered, index = x.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeated).scatter(1, index, repeated)
