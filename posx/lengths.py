"""Lengths as a user writes them: `512,2048`, `64..8192` (doubling), `8x` (of train_len)."""

import re
from dataclasses import dataclass

from posx.errors import UserError

FORMS = "write whole numbers such as 512,2048, a doubling range 64..8192, or multiples such as 8x"
LONGEST = 10**9  # tokens, and multiples: beyond any memory, so a slip of the finger


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


def parse(text: str, key: str = "--lengths") -> Lengths:
    """Read a comma list of lengths; `key` is where they were given.

    Raises:
        UserError: an item is none of the allowed forms; it is named.
    """
    tokens: list[int] = []
    multiples: list[float] = []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if found := re.fullmatch(r"([0-9]+)\.\.([0-9]+)", item):
            first, last = (_in_range(key, item, number) for number in found.groups())
            tokens += _doubling(key, item, first, last)
        elif found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x", item):
            multiples.append(_in_range(key, item, found[1]))
        elif re.fullmatch(r"[0-9]+", item):
            tokens.append(int(_in_range(key, item, item)))
        else:
            what = f"{item!r} is not a length" if item else "a length is missing"
            hint = "" if item else " (no blank after a comma, or all of it in quotes)"
            raise UserError(f"{key} {text!r}: {what}{hint}; {FORMS}")
    return Lengths(tuple(tokens), tuple(multiples))


def looks_like(word: str) -> bool:
    """Whether a word of the command line may have been meant as a length."""
    return re.fullmatch(r"[0-9.]+x?,?", word) is not None


def _in_range(key: str, item: str, number: str) -> float:
    """A number above 0 and not absurd.

    Raises:
        UserError: it is not.
    """
    value = float(number)
    if value <= 0:
        raise UserError(f"{key}: {item} is not above 0; {FORMS}")
    if value > LONGEST:
        raise UserError(f"{key}: {item[:40]} is above {LONGEST}; {FORMS}")
    return value


def _doubling(key: str, item: str, first: float, last: float) -> list[int]:
    """first, 2 first, 4 first, ... up to last."""
    if first > last:
        raise UserError(f"{key}: {item} falls; write the smaller one first; {FORMS}")
    lengths = []
    while first <= last:
        lengths.append(int(first))
        first *= 2
    return lengths
