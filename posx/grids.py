"""The wide tables of a report and the notes below them, as text for render and export."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from posx import stats
from posx.collect import SHARES, WITH_CHANCE, Collected, Row
from posx.summary import (
    CURVE,
    cells,
    curve_name,
    evaluations,
    grouped,
    records,
    summarise,
)

TABLE = ["task", "train_len"]  # a table each
MARKS = {"performs": "P", "degrades": "D", "fails": "F", "untrained": "U", "cannot": "X"}
NA = "n/a"
LEGEND = (
    f"P: performs, 95 % lower bound of token accuracy >= {stats.PERFORMS:g}",
    "D: degrades, neither P nor F",
    f"F: fails, 95 % upper bound of skill < {stats.FAILS:g}",
    "U: untrained, did not learn train_len, so longer lengths say nothing",
    "X: does not compute, with the reason",
    "P/D: verdict of all seeds pooled / of the worst seed, where they differ",
    "-: not evaluated",
    "value: mean over seeds, with min-max; one seed has no spread",
    "skill: (token accuracy - chance) / (1 - chance)",
)
SUMMARY_LEGEND = (
    "summary: over the seeds that learned train_len; rows by AULC, then by name",
    "computes to: longest length up to which every seed computes, learned or not",
    "performs to: longest length up to which all is P; also of the worst seed",
    "these, effective length and AULC are as fine as the lengths that were evaluated",
    f"effective length: where token accuracy falls through {stats.EFFECTIVE:g}",
    "factor: performs to / train_len; also of the worst seed",
    f"AULC: mean of max(skill, 0) over log2(length / train_len) in [0, {stats.AULC_OCTAVES:g}]",
    "seeds: started/finished/converged",
    "steps: of the converged seeds",
    ">=: as far as was evaluated",
    f"n/a: no seed to tell it from; AULC needs a length of {2**stats.AULC_OCTAVES:g}x or more",
)
CAVEAT = (
    "A mechanism study of tiny models, not a ranking of encodings for large ones:",
    "curves cross, and tasks order schemes differently.",
)


@dataclass(frozen=True)
class Cell:
    """A value and, below it, its spread or the reason why there is no value."""

    value: str
    spread: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Grid:
    """A wide table: a name and one cell a column in every row, heads of several lines."""

    title: str
    corner: tuple[str, ...]
    heads: list[tuple[str, ...]]
    rows: list[tuple[str, list[Cell]]]


def grids(data: Collected, metric: str = "token_acc") -> list[Grid]:
    """The two tables of each (task, train_len): the metric by length, and the summary numbers."""
    rows = evaluations(data, metric)
    summary = summarise(rows, data.runs).sort_values(
        ["task", "train_len", "aulc", "label", "extension"],
        ascending=[True, True, False, True, True],
        na_position="last",
    )
    table = cells(rows, metric)
    measured = grouped(records(table, table), CURVE)
    found = []
    for (task, train_len), curves in grouped(records(summary, summary), TABLE).items():
        title = f"{task}, train_len {train_len}"
        both = [(curve, measured.get(tuple(curve[name] for name in CURVE), [])) for curve in curves]
        found.append(_length_grid(title, both, train_len, metric))
        body = [(curve_name(curve), _summary_cells(curve)) for curve in curves]
        found.append(Grid(f"{title}: summary", ("",), _SUMMARY_HEADS, body))
    return found


def loose_ends(data: Collected) -> list[str]:
    """One sentence for each run that did not finish, has no evaluation or cannot be read, and for
    each length at which runs saw different sequences."""
    evaluated = set(data.rows["folder"])
    found = []
    for run in records(data.runs, data.runs):
        state = [] if run["run_status"] == "finished" else [run["run_status"]]
        state += [] if run["folder"] in evaluated else ["not evaluated"]
        if state:
            reason = f": {run['run_reason']}" if run["run_reason"] else ""
            found.append(f"{', '.join(state)}: {run['folder']}{reason}")
    draws = data.rows[["task", "length", "eval_seed", "sequences"]].drop_duplicates()
    for (task, length), several in draws.groupby(["task", "length"]):
        if len(several) > 1:
            found.append(
                f"{task} at {length} tokens: not all cells are of the same sequences; see "
                "eval_seed and sequences in eval.csv, and `posx eval --again`"
            )
    return found + [f"left out: {reason}" for reason in data.left_out]


# -- the metric by length ------------------------------------------------------------------------


def _length_grid(
    title: str, curves: list[tuple[Row, list[Row]]], train_len: int, metric: str
) -> Grid:
    columns = grouped((cell for _, mine in curves for cell in mine), ["length"])
    with_chance = metric in WITH_CHANCE
    corner = ("length in tokens", "times train_len", *(["chance"] if with_chance else []))
    heads = []
    for (length,), column in columns.items():
        below = [_chance(column)] if with_chance else []
        heads.append((str(length), f"{length / train_len:.4g}x", *below))
    body = []
    for curve, mine in curves:
        for trained in (True, False):
            part = {cell["length"]: cell for cell in mine if cell["trained"] == trained}
            if part or (trained and not mine):
                name = curve_name(curve) if trained else _untrained_name(curve)
                body.append((name, [_length_cell(part.get(at), metric) for (at,) in columns]))
    return Grid(f"{title}: {metric} by length", corner, heads, body)


def _length_cell(cell: Row | None, metric: str) -> Cell:
    if cell is None:
        return Cell("-")
    verdict, poorest = cell["verdict"], cell["verdict_worst"]
    if verdict == "cannot":
        return Cell(MARKS[verdict], cell["status"].replace("_", " "), verdict)
    mark = MARKS[verdict] if verdict == poorest else f"{MARKS[verdict]}/{MARKS[poorest]}"
    spread = _between(cell["min"], cell["max"], lambda value: _short(value, metric))
    return Cell(f"{_number(cell['mean'], metric)} {mark}", spread, verdict)


def _untrained_name(curve: Row) -> str:
    share = f"{curve['n_untrained']} of {curve['n_evaluated']} seeds"
    return f"{curve_name(curve)} (untrained: {share})"


def _chance(column: list[Row]) -> str:
    """A baseline over the curves of a table: one number unless task settings differ."""
    values = [cell["chance"] for cell in column if not pd.isna(cell["chance"])]
    if not values:
        return NA
    return "-".join(dict.fromkeys(f"{value:.3f}" for value in (min(values), max(values))))


# -- the summary numbers -------------------------------------------------------------------------

_SUMMARY_HEADS = [
    ("computes", "to"),
    ("performs", "to"),
    ("effective", "length"),
    ("factor",),
    ("AULC",),
    ("seeds",),
    ("steps",),
]


def _summary_cells(curve: Row) -> list[Cell]:
    one = curve["n_evaluated"] - curve["n_untrained"] < 2  # then no seed is the worst

    def reached(name: str) -> str:
        end = ">=" if curve[name] == curve["longest"] else ""
        return end + _tokens(curve[name])

    def spread(name: str, show: Callable[[float], str]) -> str:
        return _between(curve[f"{name}_min"], curve[f"{name}_max"], show)

    at_least = ">=" if curve["effective_at_least"] else ""
    counts = f"{curve['n_started']}/{curve['n_finished']}/{curve['n_converged']}"
    return [
        Cell(reached("computes_to")),
        Cell(reached("performs_to"), NA if one else reached("performs_to_worst")),
        Cell(at_least + _tokens(curve["effective_length"]), spread("effective_length", _tokens)),
        Cell(_times(curve["factor"]), NA if one else _times(curve["factor_worst"])),
        Cell(_number(curve["aulc"], "skill"), spread("aulc", lambda value: f"{value:.2f}")),
        Cell(counts),
        Cell(_tokens(curve["steps"]), spread("steps", _tokens)),
    ]


# -- numbers -------------------------------------------------------------------------------------


def _number(value: float, metric: str) -> str:
    if pd.isna(value):
        return NA
    return f"{value:.3f}" if metric in SHARES else f"{value:.4g}"


def _short(value: float, metric: str) -> str:
    return f"{value:.2f}" if metric in SHARES else f"{value:.3g}"


def _tokens(value: float) -> str:
    return NA if pd.isna(value) else f"{value:.0f}"


def _times(value: float) -> str:
    return NA if pd.isna(value) else f"{value:.4g}x"


def _between(low: float, high: float, show: Callable[[float], str]) -> str:
    return NA if pd.isna(low) else f"{show(low)}-{show(high)}"
