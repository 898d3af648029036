"""Lengths as a user writes them: `512,2048`, `64..8192` (doubling), `8x` (multiples of train_len)."""

import re
from dataclasses import dataclass
from typing import TypeVar

from posx.errors import UserError

N = TypeVar("N", int, float)

FORMS = "write whole numbers such as 512,2048, a doubling range 64..8192, or multiples such as 8x"


@dataclass(frozen=True)
class Lengths:
    """Parsed lengths; multiples become tokens once a run says what its training length is."""

    tokens: tuple[int, ...]
    multiples: tuple[float, ...] = ()

    def of(self, train_len: int) -> list[int]:
        """All lengths in tokens, ascending, without repeats."""
        multiplied = (round(multiple * train_len) for multiple in self.multiples)
        return sorted({*self.tokens, *multiplied})


# Dense just above the training length, where the fall usually is.
DEFAULT = Lengths((), (1, 1.125, 1.25, 1.5, 2, 4, 8, 32, 128))


def parse(text: str) -> Lengths:
    """Read a comma list of lengths.

    Raises:
        UserError: an item is none of the allowed forms; it is named.
    """
    tokens: list[int] = []
    multiples: list[float] = []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if found := re.fullmatch(r"(\d+)\.\.(\d+)", item):
            tokens += _doubling(item, int(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\d+(?:\.\d+)?)x", item):
            multiples.append(_positive(item, float(found[1])))
        elif re.fullmatch(r"\d+", item):
            tokens.append(_positive(item, int(item)))
        else:
            what = f"{item!r} is not a length" if item else "a length is missing"
            raise UserError(f"--lengths {text!r}: {what}; {FORMS}")
    return Lengths(tuple(tokens), tuple(multiples))


def _positive(item: str, value: N) -> N:
    if value <= 0:
        raise UserError(f"--lengths: {item} is not above 0; {FORMS}")
    return value


def _doubling(item: str, first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to last."""
    if not 0 < first <= last:
        raise UserError(f"--lengths: {item} must rise from above 0; {FORMS}")
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths
