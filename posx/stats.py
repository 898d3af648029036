"""The statistics of posx: intervals, verdicts and the summary numbers of a curve over lengths.

The thresholds were fixed before any reference result. Rows are mappings with the columns of
eval.csv and are always selected by their `length`, never by their place in a list.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Z = 1.959963984540054  # two-sided 95 % of the normal distribution
TRAINED = 0.95  # lower bound of token accuracy at train_len, below which a run is untrained
PERFORMS = 0.95  # lower bound of token accuracy
FAILS = 0.10  # upper bound of skill
EFFECTIVE = 0.9  # token accuracy that the effective length looks for
AULC_OCTAVES = 3.0  # the area runs from 1x to 8x of train_len

VERDICTS = ("performs", "degrades", "fails", "untrained", "cannot")  # from best to worst

Row = Mapping[str, Any]


# -- intervals -----------------------------------------------------------------------------------


def wilson(successes: float, n: float, n_eff: float | None = None) -> tuple[float, float]:
    """95 % Wilson score interval of a share; `n_eff` independent draws stand for `n` where given.

    Without a draw nothing is known: (0, 1).
    """
    assert 0 <= successes <= n, f"{successes} successes in {n}"
    size = n if n_eff is None else n_eff
    if n == 0 or size <= 0:
        return 0.0, 1.0
    p = successes / n
    a = Z * Z / size
    centre = (p + a / 2) / (1 + a)
    half = math.sqrt(a * p * (1 - p) + a * a / 4) / (1 + a)
    # 0/n and n/n have an exact end, which rounding would miss by 1e-17.
    lo = 0.0 if successes == 0 else max(0.0, centre - half)
    hi = 1.0 if successes == n else min(1.0, centre + half)
    return lo, hi


def design_effect(correct: Sequence[float], tokens_per_sequence: float | Sequence[float]) -> float:
    """Variance of the per-sequence accuracies over what independent tokens would give.

    `correct` has the number of right tokens of each sequence; `tokens_per_sequence` is one number,
    or one a sequence (then as for a ratio estimate). It is 1 where it cannot be told: with one
    sequence, or with all tokens right or all wrong.
    """
    right = np.asarray(correct, dtype=float)
    sizes = np.broadcast_to(np.asarray(tokens_per_sequence, dtype=float), right.shape)
    sequences, tokens = right.size, sizes.sum()
    if sequences < 2 or tokens == 0:
        return 1.0
    p = right.sum() / tokens
    if p <= 0 or p >= 1:
        return 1.0
    between = np.square(right - p * sizes).sum() * sequences / (sequences - 1)
    return float(between / (tokens * p * (1 - p)))


def effective_n(tokens: float, deff: float) -> float:
    """How many independent tokens that many clustered ones are worth; never more than there are."""
    return tokens / max(1.0, deff)


def n_behind(acc: float, lo: float, hi: float) -> float:
    """The sample size that a Wilson interval was made with."""
    end = lo if acc >= 0.5 else hi  # the end that lies apart from acc, also at 0 and 1
    gap = acc - end
    return Z * Z * end * (1 - end) / (gap * gap) if gap else math.inf


def pool(rows: Iterable[Row]) -> tuple[float, float, float]:
    """Token accuracy and its interval over the tokens of several runs at one length.

    The rows need sequences, token_acc, token_acc_lo and token_acc_hi. Each run brings the sample
    size of its own interval, so a design effect found there stays in force.
    """
    rows = list(rows)
    n = sum(row["sequences"] for row in rows)
    acc = math.fsum(row["sequences"] * row["token_acc"] for row in rows) / n
    size = sum(n_behind(row["token_acc"], row["token_acc_lo"], row["token_acc_hi"]) for row in rows)
    if math.isinf(size):
        return acc, acc, acc
    return acc, *wilson(acc * size, size)


# -- one cell ------------------------------------------------------------------------------------


def skill(acc: float, chance: float) -> float:
    """Accuracy on a scale where the task's baseline is 0 and all right is 1; NaN where it is 1."""
    return (acc - chance) / (1 - chance) if chance < 1 else math.nan


def is_trained(lo_at_train_len: float) -> bool:
    """Whether a run learned its training length, so that longer ones say something."""
    return lo_at_train_len >= TRAINED


def verdict(computes: bool, lo: float, skill_hi: float, trained: bool) -> str:
    """The verdict of one (run, extension, length).

    Args:
        computes: whether the forward pass finished.
        lo: lower end of the interval of token accuracy.
        skill_hi: skill at the upper end of that interval.
        trained: `is_trained` of the run at train_len; where it is not, no length has another
            verdict than `untrained`, train_len included.
    """
    if not computes:
        return "cannot"
    if not trained:
        return "untrained"
    if lo >= PERFORMS:
        return "performs"
    return "fails" if skill_hi < FAILS else "degrades"


def worst(verdicts: Iterable[str]) -> str:
    """The worst of several verdicts."""
    return max(verdicts, key=VERDICTS.index)


# -- one curve over lengths ----------------------------------------------------------------------


class EffectiveLength(NamedTuple):
    """Where accuracy crosses 0.9; `at_least` where it never does within the evaluated lengths."""

    length: float
    at_least: bool


def computes_to(rows: Iterable[Row], train_len: int) -> int:
    """The longest length up to which every evaluated length from train_len on computes, else 0."""
    return _reach(rows, train_len, lambda row: bool(row["computes"]))


def performs_to(rows: Iterable[Row], train_len: int) -> int:
    """The longest length up to which every evaluated length from train_len on performs, else 0."""
    return _reach(rows, train_len, lambda row: row["verdict"] == "performs")


def effective_length(rows: Iterable[Row], train_len: int) -> EffectiveLength:
    """The length at which token accuracy falls through 0.9, interpolated in log2(length).

    From train_len on all shorter evaluated lengths are at 0.9 or above. It is 0 where train_len
    itself is below, and NaN without a row. Before a length that does not compute it is the last one
    that does: nothing is interpolated towards an accuracy that does not exist.
    """
    before: tuple[float, float] | None = None
    for row in _from(rows, train_len):
        length, acc = float(row["length"]), float(row["token_acc"])
        if not row["computes"] or not math.isfinite(acc):
            return EffectiveLength(before[0] if before else 0.0, False)
        if acc < EFFECTIVE:
            return EffectiveLength(_crossing(before, (length, acc)) if before else 0.0, False)
        before = length, acc
    return EffectiveLength(before[0], True) if before else EffectiveLength(math.nan, False)


def extrapolation_factor(rows: Iterable[Row], train_len: int) -> float:
    """performs_to as a multiple of train_len, 0 where not even train_len performs."""
    return performs_to(rows, train_len) / train_len


def aulc(rows: Iterable[Row], train_len: int) -> float:
    """Area under the length curve: mean clipped skill over log2(length / train_len) in [0, 3].

    Trapezoids between the evaluated lengths; a length that does not compute has skill 0. NaN where
    train_len was not evaluated or nothing at 8x or beyond was: a part is not the whole.
    """
    rows = _from(rows, train_len)
    octaves = [math.log2(row["length"] / train_len) for row in rows]
    if not rows or octaves[0] != 0 or octaves[-1] < AULC_OCTAVES:
        return math.nan
    skills = [min(max(row["skill"], 0.0), 1.0) if row["computes"] else 0.0 for row in rows]
    area = 0.0
    for (left, right), (before, after) in zip(pairwise(octaves), pairwise(skills), strict=True):
        if right > AULC_OCTAVES:  # the line up to the end
            after = before + (after - before) / (right - left) * (AULC_OCTAVES - left)
            right = AULC_OCTAVES
        if left < AULC_OCTAVES:
            area += (right - left) * (before + after) / 2
    return area / AULC_OCTAVES


def _from(rows: Iterable[Row], train_len: int) -> list[Row]:
    """The rows at train_len and above, shortest first."""
    rows = [row for row in rows if row["length"] >= train_len]
    return sorted(rows, key=lambda row: row["length"])


def _reach(rows: Iterable[Row], train_len: int, holds: Callable[[Row], bool]) -> int:
    reached = 0
    for row in _from(rows, train_len):
        if not holds(row):
            break
        reached = int(row["length"])
    return reached


def _crossing(above: tuple[float, float], below: tuple[float, float]) -> float:
    """Where the line from `above` to `below`, in log2(length), has the accuracy 0.9."""
    share = (above[1] - EFFECTIVE) / (above[1] - below[1])
    return above[0] * (below[0] / above[0]) ** share
