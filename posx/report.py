"""Comparison tables from runs: long rows, a summary, and what is printed, exported and drawn.

Rows stay long (one fact a line) up to `grids`, which makes the wide tables for render and export.
Runs of one group (the same configuration with other seeds) are summarised together and runs of two
groups never. Within a group the seeds that did not learn train_len get a row of their own: nothing
is dropped, and what they do at longer lengths does not count for or against the scheme.
"""

import difflib
import html
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posx import stats
from posx.errors import UserError
from posx.runs import EVAL_COLUMNS, NO_EXTENSION, Run, write_atomic

FORMATS = ("table", "csv", "md", "latex", "json", "html")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

NOTE = (
    "This is a mechanism study of tiny models, not a ranking of encodings for large ones: curves "
    "cross, and tasks order schemes differently."
)
MARKS = {"performs": "P", "degrades": "D", "fails": "F", "untrained": "U", "cannot": "X"}
STYLES = {
    "performs": "green",
    "degrades": "yellow",
    "fails": "red",
    "untrained": "dim",
    "cannot": "magenta",
}
LEGEND = (
    f"P performs: lower 95 % bound of token accuracy >= {stats.PERFORMS:g}. D degrades. "
    f"F fails: upper bound of skill < {stats.FAILS:g}. U untrained: train_len was not learned, "
    "longer lengths are n/a. X does not compute. P/D: all seeds pooled / the worst seed. "
    "- was not evaluated. "
    "Below a value: its min-max over seeds, n/a with one seed."
)
SUMMARY_LEGEND = (
    "Over the seeds that learned train_len; below a value the worst seed (performs to, factor) or "
    "min-max; computes to over all seeds, the worst one; steps over converged seeds. "
    ">=: the longest evaluated length. AULC: mean clipped skill over log2(length / train_len) in "
    "[0, 3]; rows stand in its order, largest first, then by name."
)

# Columns of eval.csv that say which evaluation a row is, or are text: no metric.
_NOT_METRICS = {
    *("scheme", "extension", "task", "seed", "train_len", "length", "items", "sequences"),
    *("computes", "status", "reason", "chance", "verdict", "path"),
}
_SHARES = {name for name in EVAL_COLUMNS if name.startswith(("token_acc", "exact_match", "acc_"))}
_SHARES |= {"first_error", "skill", "generated_acc"}
_WITH_CHANCE = {"token_acc", "generated_acc"}  # the metrics that the `chance` column is about

GROUP = ["task", "train_len", "label", "group", "scheme"]
CURVE = [*GROUP, "extension"]
_POOLED = ["sequences", "token_acc", "token_acc_lo", "token_acc_hi"]
_SUMMED = ["length", "computes", "verdict", "token_acc", "skill", "trained"]


def report(
    runs: Sequence[Run],
    results_dir: Path,
    *,
    metric: str = "token_acc",
    tasks: Sequence[str] = (),
    schemes: Sequence[str] = (),
    fmt: str = "table",
    output: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Print or write the comparison of `runs` and draw it where `plot` is given.

    Returns:
        The files that were written.

    Raises:
        UserError: no runs, a filter without a match, an unknown metric or format.
    """
    console = console or Console()
    if not runs:
        raise UserError(f"no runs in {results_dir}: train one with `posx train scheme=rope`")
    _one_of("metric", metric, metrics())
    _one_of("format", fmt, FORMATS)
    known = inventory(select(runs, tasks, schemes), results_dir)
    rows = collect(known)
    _check_values(rows, metric)
    written = []
    if plot is not None:
        draw(rows, plot, metric)
        written.append(plot)
    if output is not None:
        if fmt == "table":
            text = _table_text(rows, known, metric, console.width)
        else:
            text = export(rows, known, metric, fmt)
        write_atomic(output, lambda file: file.write(text.encode()))
        written.append(output)
    elif fmt == "table":
        render(rows, known, metric, console)
    else:
        console.file.write(_encodable(export(rows, known, metric, fmt), console.encoding))
    return written


# -- which runs, which metric --------------------------------------------------------------------


def select(runs: Sequence[Run], tasks: Sequence[str], schemes: Sequence[str]) -> list[Run]:
    """The runs of these tasks and these schemes (or variant labels); all where none are named.

    Raises:
        UserError: a name that no run has, or a combination that no run has.
    """
    records = [(run, run.record()) for run in runs]
    for name in tasks:
        _one_of("task", name, {record["task"] for _, record in records})
    for name in schemes:
        names = {record["scheme"] for _, record in records}
        _one_of("scheme", name, names | {_label(record) for _, record in records})
    chosen = [
        run
        for run, record in records
        if (not tasks or record["task"] in tasks)
        and (not schemes or record["scheme"] in schemes or _label(record) in schemes)
    ]
    if not chosen:
        pairs = sorted({f"{record['task']} with {record['scheme']}" for _, record in records})
        raise UserError(
            f"no run of task {', '.join(tasks)} with scheme {', '.join(schemes)}; "
            f"there is {'; '.join(pairs)}"
        )
    return chosen


def metrics() -> list[str]:
    """The columns of eval.csv that a report can be about."""
    return [name for name in EVAL_COLUMNS if name not in _NOT_METRICS]


def _one_of(kind: str, given: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not there.

    Raises:
        UserError: names the nearest and all that exist.
    """
    allowed = sorted(allowed)
    if given in allowed:
        return
    near = difflib.get_close_matches(given, allowed, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"unknown {kind} {given}{hint}; there is {', '.join(allowed)}")


def _check_values(rows: pd.DataFrame, metric: str) -> None:
    """Refuse a metric that these runs were not evaluated for.

    Raises:
        UserError: the column is empty although something was computed.
    """
    if rows["computes"].any() and rows[metric].isna().all():
        filled = [name for name in metrics() if rows[name].notna().any()]
        raise UserError(f"no evaluation here has a {metric}; there is {', '.join(filled)}")


# -- long rows -----------------------------------------------------------------------------------


def inventory(runs: Sequence[Run], results_dir: Path | None = None) -> pd.DataFrame:
    """One row a run, from its record; `folder` is relative to `results_dir` where it can be."""
    rows = []
    for run in runs:
        record = run.record()
        folder = run.folder
        if results_dir is not None and folder.is_relative_to(results_dir):
            folder = folder.relative_to(results_dir)
        rows.append(
            {
                "task": record["task"],
                "train_len": record["train_len"],
                "label": _label(record),
                "group": str(record["group"]),
                "scheme": record["scheme"],
                "seed": record["seed"],
                "run_status": record["status"],
                "run_reason": record.get("reason") or "",
                "converged": record.get("converged") is True,
                "steps": record.get("steps"),
                "folder": str(folder),
                "run": run,
            }
        )
    frame = pd.DataFrame(rows)
    frame["label"] = _distinct_labels(frame)
    return frame


def collect(known: pd.DataFrame) -> pd.DataFrame:
    """All evaluation rows of the runs in an inventory, in long form; every row in is a row out.

    A row is an eval.csv row with label, group, converged, folder and `trained`: whether the run
    learned its train_len, as its own verdicts say.
    """
    rows = []
    for run in known.to_dict("records"):
        table = _records(run["run"].table("eval"), list(EVAL_COLUMNS))
        trained = all(row["verdict"] != "untrained" for row in table)
        added = {name: run[name] for name in (*GROUP, "converged", "folder")}
        rows += [{**row, **added, "trained": trained} for row in table]
    columns = [*EVAL_COLUMNS, "label", "group", "converged", "folder", "trained"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"computes": bool, "trained": bool})


def cells(rows: pd.DataFrame, metric: str = "token_acc") -> pd.DataFrame:
    """One row a (curve, trained or not, length): the metric over seeds, and both verdicts.

    min and max are empty with one seed: one value has no spread.
    """
    found = []
    at = [*CURVE, "trained", "length"]
    for key, part in _parts(rows, at):
        found.append(dict(zip(at, key, strict=True)) | _cell(part, metric))
    columns = [*at, "n_seeds", "n_computing", "mean", "min", "max"]
    columns += ["chance", "verdict", "verdict_worst", "status"]
    return pd.DataFrame(found, columns=columns)


def _cell(part: pd.DataFrame, metric: str) -> dict[str, Any]:
    """The rows of one length, one a seed, as one."""
    good = part[part["computes"]]
    values = good[metric].dropna()
    several = len(values) > 1
    return {
        "n_seeds": len(part),
        "n_computing": len(good),
        "mean": values.mean() if len(values) else math.nan,
        "min": values.min() if several else math.nan,
        "max": values.max() if several else math.nan,
        "chance": part["chance"].mean(),
        "verdict": _pooled_verdict(part),
        "verdict_worst": stats.worst(part["verdict"]),
        "status": "ok" if len(good) else part["status"].mode()[0],
    }


def _pooled_verdict(part: pd.DataFrame) -> str:
    """The verdict over the tokens of all seeds that compute."""
    good = part[part["computes"]]
    if len(good) < 2:
        return stats.worst(good["verdict"]) if len(good) else "cannot"
    _, lo, hi = stats.pool(_records(good, _POOLED))
    skill_hi = stats.skill(hi, good["chance"].mean())
    return stats.verdict(True, lo, skill_hi, bool(good["trained"].all()))


def summarise(rows: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """One row a (task, label, group, train_len, extension): seed counts and the summary numbers.

    performs_to and the factor are of the pooled seeds, with the worst seed's beside them. They, the
    effective length and AULC are over the seeds that learned train_len, and empty without one; a
    min and max is empty with one.
    """
    found = []
    for key, runs in _parts(known, GROUP):
        group = dict(zip(GROUP, key, strict=True))
        part = rows[rows["folder"].isin(runs["folder"])]
        for extension in sorted(set(part["extension"])) or [NO_EXTENSION]:
            curve = part[part["extension"] == extension]
            counts = _counts(runs, curve)
            found.append({**group, "extension": extension, **counts, **_headline(curve)})
    return pd.DataFrame(found)


def _counts(runs: pd.DataFrame, curve: pd.DataFrame) -> dict[str, Any]:
    return {
        "n_started": len(runs),
        "n_finished": int((runs["run_status"] == "finished").sum()),
        "n_converged": int(runs["converged"].sum()),
        "n_evaluated": curve["folder"].nunique(),
        "n_untrained": curve.loc[~curve["trained"], "folder"].nunique(),
        **_spread("steps", runs.loc[runs["converged"], "steps"].dropna()),
        "folders": ";".join(runs["folder"]),
    }


def _headline(curve: pd.DataFrame) -> dict[str, Any]:
    """The summary numbers of one extension of one group."""
    train_len = int(curve["train_len"].iloc[0]) if len(curve) else 0
    seeds = [_records(part, _SUMMED) for _, part in _parts(curve, ["folder"])]
    trained = [seed for seed in seeds if seed[0]["trained"]]
    learned = curve[curve["trained"]]
    pooled = [
        {"length": length, "verdict": _pooled_verdict(part)}
        for (length,), part in _parts(learned, ["length"])
    ]
    performs = [stats.performs_to(seed, train_len) for seed in trained]
    pooled_to = stats.performs_to(pooled, train_len) if trained else math.nan
    worst_to = min(performs, default=math.nan)
    effective = [stats.effective_length(seed, train_len) for seed in trained]
    computes = [stats.computes_to(seed, train_len) for seed in seeds]
    return {
        "longest": max((row["length"] for seed in seeds for row in seed), default=math.nan),
        "computes_to": min(computes, default=math.nan),
        "performs_to": pooled_to,
        "performs_to_worst": worst_to,
        **_spread("effective_length", pd.Series([found.length for found in effective])),
        "effective_at_least": any(found.at_least for found in effective),
        "factor": pooled_to / train_len if trained else math.nan,
        "factor_worst": worst_to / train_len if trained else math.nan,
        **_spread("aulc", pd.Series([stats.aulc(seed, train_len) for seed in trained])),
    }


def _spread(name: str, values: pd.Series) -> dict[str, float]:
    """Mean, min and max of a value over seeds; min and max only where there are several."""
    values = values.dropna().astype(float)
    several = len(values) > 1
    return {
        name: values.mean() if len(values) else math.nan,
        f"{name}_min": values.min() if several else math.nan,
        f"{name}_max": values.max() if several else math.nan,
    }


def _parts(frame: pd.DataFrame, by: list[str]) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The values of the columns `by`, a tuple, and the rows that have them; no row is left out."""
    yield from frame.groupby(by, dropna=False)


def _records(frame: pd.DataFrame, columns: list[str]) -> list[dict[str, Any]]:
    """Rows as dicts of some columns; to_dict takes ten times as long on the few rows of a cell."""
    values = zip(*(frame[column].tolist() for column in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _label(record: Mapping[str, Any]) -> str:
    return record.get("label") or record["scheme"]


def _distinct_labels(frame: pd.DataFrame) -> list[str]:
    """Labels that tell groups apart: where two share one, the start of the group is added."""
    groups = frame.groupby(["task", "train_len", "label"])["group"]
    shared = groups.transform("nunique") > 1
    return [
        f"{label} #{group[:6]}" if clash else label
        for label, group, clash in zip(frame["label"], frame["group"], shared, strict=True)
    ]


# -- wide tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A value and, below it, its spread."""

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


def grids(rows: pd.DataFrame, known: pd.DataFrame, metric: str = "token_acc") -> list[Grid]:
    """The two tables of each (task, train_len): the metric by length, and the summary numbers."""
    summary = summarise(rows, known)
    summary = summary.sort_values(
        ["task", "train_len", "aulc", "label", "extension"],
        ascending=[True, True, False, True, True],
        na_position="last",
    )
    table = cells(rows, metric)
    found = []
    for (task, train_len), part in _parts(summary, ["task", "train_len"]):
        here = table[(table["task"] == task) & (table["train_len"] == train_len)]
        title = f"{task}, train_len {train_len}"
        found.append(_length_grid(title, part, here, int(train_len), metric))
        found.append(_summary_grid(title, part))
    return found


def _length_grid(
    title: str, summary: pd.DataFrame, table: pd.DataFrame, train_len: int, metric: str
) -> Grid:
    lengths = sorted(set(table["length"]))
    with_chance = metric in _WITH_CHANCE
    corner = ("length in tokens", "times train_len", *(["chance"] if with_chance else []))
    heads = []
    for length in lengths:
        chance = table.loc[table["length"] == length, "chance"].dropna()
        below = [_range(chance)] if with_chance else []
        heads.append((str(length), f"{length / train_len:.4g}x", *below))
    body = []
    for curve in summary.to_dict("records"):
        mine = table[(table["group"] == curve["group"]) & (table["label"] == curve["label"])]
        mine = mine[mine["extension"] == curve["extension"]]
        for trained in (True, False):
            part = mine[mine["trained"] == trained].set_index("length").to_dict("index")
            if part or (trained and not len(mine)):
                name = _name(curve) if trained else _untrained_name(curve)
                body.append((name, [_length_cell(part.get(at), metric) for at in lengths]))
    return Grid(f"{title}: {metric} by length", corner, heads, body)


def _length_cell(cell: dict[str, Any] | None, metric: str) -> Cell:
    if cell is None:
        return Cell("-")
    verdict, poorest = cell["verdict"], cell["verdict_worst"]
    if verdict == "cannot":
        return Cell(MARKS[verdict], cell["status"].replace("_", " "), verdict)
    mark = MARKS[verdict] if verdict == poorest else f"{MARKS[verdict]}/{MARKS[poorest]}"
    spread = _between(cell["min"], cell["max"], lambda value: _short(value, metric))
    return Cell(f"{_number(cell['mean'], metric)} {mark}", spread, verdict)


def _summary_grid(title: str, summary: pd.DataFrame) -> Grid:
    heads = [
        ("computes", "to"),
        ("performs", "to"),
        ("effective", "length"),
        ("factor",),
        ("AULC",),
        ("seeds", "started/", "finished/", "converged"),
        ("steps",),
    ]
    body = [(_name(curve), _summary_cells(curve)) for curve in summary.to_dict("records")]
    return Grid(f"{title}: summary", ("",), heads, body)


def _summary_cells(curve: dict[str, Any]) -> list[Cell]:
    one = curve["n_evaluated"] - curve["n_untrained"] < 2  # then no seed is the worst
    longest = curve["longest"]

    def reached(name: str) -> str:
        end = ">=" if curve[name] == longest else ""
        return end + _tokens(curve[name])

    def spread(name: str, show: Any) -> str:
        return _between(curve[f"{name}_min"], curve[f"{name}_max"], show)

    at_least = ">=" if curve["effective_at_least"] else ""
    counts = f"{curve['n_started']}/{curve['n_finished']}/{curve['n_converged']}"
    return [
        Cell(reached("computes_to")),
        Cell(reached("performs_to"), "n/a" if one else reached("performs_to_worst")),
        Cell(at_least + _tokens(curve["effective_length"]), spread("effective_length", _tokens)),
        Cell(_times(curve["factor"]), "n/a" if one else _times(curve["factor_worst"])),
        Cell(_number(curve["aulc"], "skill"), spread("aulc", lambda v: _short(v, "skill"))),
        Cell(counts),
        Cell(_tokens(curve["steps"]), spread("steps", _tokens)),
    ]


def _name(curve: dict[str, Any]) -> str:
    extension = curve["extension"]
    return curve["label"] if extension == NO_EXTENSION else f"{curve['label']} + {extension}"


def _untrained_name(curve: dict[str, Any]) -> str:
    return f"{_name(curve)} (untrained: {curve['n_untrained']} of {curve['n_evaluated']} seeds)"


def _number(value: float, metric: str) -> str:
    if pd.isna(value):
        return "n/a"
    return f"{value:.3f}" if metric in _SHARES else f"{value:.4g}"


def _short(value: float, metric: str) -> str:
    return f"{value:.2f}" if metric in _SHARES else f"{value:.3g}"


def _tokens(value: float) -> str:
    return "n/a" if pd.isna(value) else f"{value:.0f}"


def _times(value: float) -> str:
    return "n/a" if pd.isna(value) else f"{value:.4g}x"


def _between(low: float, high: float, show: Any) -> str:
    return "n/a" if pd.isna(low) else f"{show(low)}-{show(high)}"


def _range(values: pd.Series) -> str:
    """A baseline over the curves of a table: one number unless task settings differ."""
    if not len(values):
        return "n/a"
    ends = [f"{value:.3f}" for value in (values.min(), values.max())]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def _loose_ends(known: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """One sentence for each run that did not finish or has no evaluation."""
    evaluated = set(rows["folder"])
    found = []
    for run in known.to_dict("records"):
        state = [] if run["run_status"] == "finished" else [run["run_status"]]
        state += [] if run["folder"] in evaluated else ["not evaluated"]
        if state:
            reason = f": {run['run_reason']}" if run["run_reason"] else ""
            found.append(f"{', '.join(state)}: {run['folder']}{reason}")
    return found


# -- a terminal ----------------------------------------------------------------------------------


def render(rows: pd.DataFrame, known: pd.DataFrame, metric: str, console: Console) -> None:
    """Print the tables; a table wider than the console is continued below, name column repeated."""
    for grid in grids(rows, known, metric):
        for table in _rich_tables(grid, console):
            console.print(table, crop=False)
            console.print()
    for sentence in (LEGEND, SUMMARY_LEGEND, NOTE):
        console.print(Text(sentence))
    ends = _loose_ends(known, rows)
    if ends:
        console.print()
        console.print(Text("Runs that did not finish or were not evaluated:"))
    for sentence in ends:
        console.print(Text(_printable(sentence, console.encoding)), soft_wrap=True)


def _table_text(rows: pd.DataFrame, known: pd.DataFrame, metric: str, width: int) -> str:
    file = io.StringIO()
    render(rows, known, metric, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def _rich_tables(grid: Grid, console: Console) -> list[Table]:
    names = [_printable(name, console.encoding) for name, _ in grid.rows]
    first = _name_width([*names, *grid.corner], console.width)
    widths = [_column_width(grid, index) for index in range(len(grid.heads))]
    pages = _pages(widths, console.width - first) or [[]]
    return [
        _rich_table(grid, names, page, first, widths, f" ({number} of {len(pages)})")
        if len(pages) > 1
        else _rich_table(grid, names, page, first, widths, "")
        for number, page in enumerate(pages, 1)
    ]


def _rich_table(
    grid: Grid, names: list[str], page: list[int], first: int, widths: list[int], part: str
) -> Table:
    table = Table(
        title=Text(grid.title + part, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, _GAP, 0, 0),
        # Its own width, so that a name longer than the console is printed and not squeezed.
        width=first + sum(widths[index] + _GAP + 1 for index in page) + _GAP,
    )
    table.add_column(Text("\n".join(grid.corner)), width=first, overflow="fold")
    for index in page:
        head = Text("\n".join(grid.heads[index]))
        table.add_column(head, width=widths[index], justify="right", overflow="fold")
    for name, (_, row) in zip(names, grid.rows, strict=True):
        table.add_row(Text(name), *[_rich_cell(row[index]) for index in page])
    return table


_GAP = 1  # blanks right of a column, beside the one that the box has between columns


def _rich_cell(cell: Cell) -> Text:
    style = STYLES.get(cell.verdict, "")
    text = Text(cell.value, style=style)
    if cell.spread:
        text.append(f"\n{cell.spread}", style="dim")
    return text


def _name_width(texts: Sequence[str], console_width: int) -> int:
    """Wide enough for every word; whole names where they leave more than half of the console."""
    whole = max((cell_len(text) for text in texts), default=0)
    word = max((cell_len(word) for text in texts for word in text.split()), default=0)
    return max(word, min(whole, console_width * 2 // 5))


def _column_width(grid: Grid, index: int) -> int:
    """Wide enough for heads and values; a status may wrap between its words."""
    lines = [*grid.heads[index]]
    for _, row in grid.rows:
        lines += [row[index].value, *row[index].spread.split()]
    return max(cell_len(line) for line in lines)


def _pages(widths: list[int], room: int) -> list[list[int]]:
    """Columns dealt to as few tables as fit, and evenly; one column a table where none fits."""
    pages: list[list[int]] = []
    left = -1
    for index, width in enumerate(widths):
        need = width + _GAP + 1
        if not pages or need > left:
            pages.append([])
            left = room - _GAP
        pages[-1].append(index)
        left -= need
    if len(pages) < 2:
        return pages
    even = math.ceil(len(widths) / len(pages))
    indices = iter(range(len(widths)))
    balanced = [list(islice(indices, even)) for _ in pages]
    fits = all(sum(widths[i] + _GAP + 1 for i in page) <= room - _GAP for page in balanced)
    return [page for page in balanced if page] if fits else pages


def _printable(text: str, encoding: str) -> str:
    """The text without control characters and with escapes for what the stream cannot show."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _encodable(text, encoding)


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- files ---------------------------------------------------------------------------------------


def export(rows: pd.DataFrame, known: pd.DataFrame, metric: str, fmt: str) -> str:
    """The report as text.

    csv and json are long: one row a (curve, trained or not, length), with the metric over seeds,
    both verdicts, and the summary numbers of the curve repeated on each of its rows. A group that
    was never evaluated has one row without a length. md, latex and html have the printed tables.
    """
    if fmt == "csv":
        return long(rows, known, metric).to_csv(index=False, lineterminator="\n")
    if fmt == "json":
        return _json(long(rows, known, metric))
    notes = [LEGEND, SUMMARY_LEGEND, NOTE, *_loose_ends(known, rows)]
    writers = {"md": _markdown, "latex": _latex, "html": _html}
    return writers[fmt](grids(rows, known, metric), notes)


def long(rows: pd.DataFrame, known: pd.DataFrame, metric: str) -> pd.DataFrame:
    """What csv and json hold, as a data frame."""
    table = cells(rows, metric).assign(metric=metric)
    frame = summarise(rows, known).merge(table, on=CURVE, how="left")
    first = [*CURVE, "trained", "length", "metric"]
    measured = [name for name in table if name not in first]
    ordered = [*first, *measured, *[name for name in frame if name not in (*first, *measured)]]
    frame["n_seeds"] = frame["n_seeds"].fillna(0).astype(int)
    return frame[ordered].astype({"length": "Int64"})


def _json(frame: pd.DataFrame) -> str:
    records = [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in frame.astype(object).to_dict("records")
    ]
    return json.dumps(records, indent=2, allow_nan=False, default=lambda value: value.item()) + "\n"


def _flat(cell: Cell) -> str:
    return f"{cell.value} ({cell.spread})" if cell.spread else cell.value


def _markdown(tables: list[Grid], notes: list[str]) -> str:
    def escape(text: str) -> str:
        return re.sub(r"([\\|`*<>\[\]])", r"\\\1", " ".join(text.split()))

    def line(values: Iterable[str]) -> str:
        return f"| {' | '.join(values)} |"

    parts = []
    for grid in tables:
        lines = [f"### {escape(grid.title)}", ""]
        lines.append(line(escape(", ".join(head)) for head in (grid.corner, *grid.heads)))
        lines.append(line(["---", *["---:" for _ in grid.heads]]))
        for name, row in grid.rows:
            lines.append(line(escape(text) for text in (name, *[_flat(cell) for cell in row])))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *[escape(note) for note in notes]]) + "\n"


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after a line break it would start an option
}


def _latex(tables: list[Grid], notes: list[str]) -> str:
    def escape(text: str) -> str:
        return "".join(_LATEX.get(c, c) for c in text)

    def stack(lines: Iterable[str]) -> str:
        lines = [escape(line) for line in lines if line]
        return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r"\\".join(lines) + "}"

    parts = ["% needs \\usepackage{booktabs}"]
    for grid in tables:
        corner = stack(grid.corner).replace("[r]", "[l]", 1) if any(grid.corner) else ""
        lines = [
            r"\begin{table}",
            rf"\caption{{{escape(grid.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * len(grid.heads)}}}",
            r"\toprule",
            " & ".join([corner, *[stack(head) for head in grid.heads]]) + r" \\",
            r"\midrule",
        ]
        for name, row in grid.rows:
            values = [stack((cell.value, cell.spread)) for cell in row]
            lines.append(" & ".join([escape(name), *values]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
    return "\n\n".join([*parts, *[escape(note) for note in notes]]) + "\n"


def _html(tables: list[Grid], notes: list[str]) -> str:
    def escape(text: str) -> str:
        return html.escape(text).replace("\n", "<br>")

    parts = []
    for grid in tables:
        heads = "".join(f"<th>{escape(chr(10).join(h))}</th>" for h in (grid.corner, *grid.heads))
        body = ""
        for name, row in grid.rows:
            cells_ = "".join(
                f'<td class="{cell.verdict}">{escape(cell.value)}'
                + (f"<br><small>{escape(cell.spread)}</small>" if cell.spread else "")
                + "</td>"
                for cell in row
            )
            body += f"<tr><th>{escape(name)}</th>{cells_}</tr>\n"
        parts.append(
            f"<table>\n<caption>{escape(grid.title)}</caption>\n"
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
        )
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return _HTML_HEAD + "\n".join(parts) + "\n"


_HTML_HEAD = """<!doctype html>
<meta charset="utf-8">
<title>posx report</title>
<style>
  body { font-family: sans-serif }
  table { border-collapse: collapse; margin-bottom: 2em }
  caption { text-align: left; font-weight: bold }
  th, td { padding: .2em .6em; text-align: right; border-bottom: 1px solid #ddd }
  tbody th { text-align: left; font-weight: normal }
  .performs { background: #d9f0d3 } .degrades { background: #fff3c4 } .fails { background: #f8d0c8 }
  .untrained { color: #888 } .cannot { background: #e6dcee }
</style>
"""


# -- a picture -----------------------------------------------------------------------------------

# Okabe and Ito's palette, told apart with any colour vision; the yellow is left out on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*<>Xph8"
_DASHES = ("-", "--", "-.")


def draw(rows: pd.DataFrame, path: Path, metric: str = "token_acc") -> None:
    """Draw the metric against length, one panel a (task, train_len), one line a curve.

    Raises:
        UserError: the suffix is none of png, svg and pdf; matplotlib is missing; nothing to draw.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("posx report --plot needs matplotlib: pip install 'posx[plot]'") from None
    if rows.empty:
        raise UserError("there is nothing to draw: no run here is evaluated, see `posx eval`")
    table = cells(rows, metric)
    table["name"] = [_plot_name(curve) for curve in table.to_dict("records")]
    panels = list(_parts(table, ["task", "train_len"]))
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    names = sorted(set(table["name"]))
    legend_columns = math.ceil(len(names) / (16 * lines))
    figure = Figure(
        figsize=(5 * columns + 2.2 * legend_columns, 3.8 * lines), dpi=150, layout="constrained"
    )
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, ((task, train_len), part) in zip(axes, panels, strict=False):
        _panel(axis, part, names, int(train_len), metric)
        axis.set_title(f"{task}, train_len {train_len}", fontsize="medium")
    for axis in axes[len(panels) :]:
        axis.remove()
    _legend(figure, names, legend_columns, metric)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower())
    write_atomic(path, lambda file: file.write(data.getbuffer()))


def _plot_name(curve: dict[str, Any]) -> str:
    return _name(curve) if curve["trained"] else f"{_name(curve)} (untrained)"


def _style(names: list[str], name: str) -> dict[str, Any]:
    """A colour, marker and dash that belong to a name in all panels."""
    index = names.index(name)
    faded = {"alpha": 0.45} if name.endswith(" (untrained)") else {}
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "markersize": 4.5,
        "linewidth": 1.4,
        **faded,
    }


def _panel(axis: Any, table: pd.DataFrame, names: list[str], train_len: int, metric: str) -> None:
    """The curves of one task and training length."""
    axis.set_xscale("log", base=2)
    axis.axvline(train_len, color="0.6", linewidth=1, zorder=0)
    crossed = 0
    for (name,), curve in _parts(table, ["name"]):
        style = _style(names, name)
        good = curve[curve["n_computing"] > 0].sort_values("length")
        axis.plot(good["length"], good["mean"], **style)
        band = good.dropna(subset=["min", "max"])
        axis.fill_between(
            band["length"], band["min"], band["max"], color=style["color"], alpha=0.15, linewidth=0
        )
        gone = curve.loc[curve["n_computing"] == 0, "length"]
        if len(gone):
            _crosses(axis, gone, style["color"], height=0.03 * crossed)
            crossed += 1  # the next ones stand higher, so that they do not hide these
    if metric in _WITH_CHANCE:
        chance = table.groupby("length")["chance"].mean()
        axis.plot(chance.index, chance, color="0.5", linestyle="--", linewidth=1, zorder=0)
    _axes(axis, sorted(set(table["length"])), train_len, metric)


def _crosses(axis: Any, lengths: pd.Series, colour: str, height: float) -> None:
    """Mark lengths at the x axis, or a share of the panel's height above it."""
    axis.plot(
        lengths,
        [height] * len(lengths),
        color=colour,
        marker="x",
        markersize=5,
        linestyle="none",
        transform=axis.get_xaxis_transform(),
        clip_on=False,
    )


def _axes(axis: Any, lengths: list[int], train_len: int, metric: str) -> None:
    shown = _ticks(lengths, train_len)
    axis.set_xticks(shown, [f"{at}\n{at / train_len:.4g}x" for at in shown], fontsize="x-small")
    axis.set_xticks(lengths, [""] * len(lengths), minor=True)
    axis.set_xlabel("length in tokens, times train_len", fontsize="small")
    axis.set_ylabel(metric, fontsize="small")
    axis.tick_params(axis="y", labelsize="small")
    axis.spines[["top", "right"]].set_visible(False)
    if metric in _SHARES:
        axis.set_ylim(-0.03, 1.03)


def _ticks(lengths: list[int], train_len: int) -> list[int]:
    """The lengths that have room for a label: train_len, and those most of an octave apart."""
    shown = [train_len]
    for length in lengths:
        if all(abs(math.log2(length / other)) >= 0.9 for other in shown):
            shown.append(length)
    return sorted(shown)


def _legend(figure: Any, names: list[str], columns: int, metric: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_style(names, name)) for name in names]
    # A dollar sign would start mathematics, and a leading underscore hide the entry.
    labels = [_wrapped(name).replace("$", r"\$") for name in names]
    labels = [f" {label}" if label.startswith("_") else label for label in labels]
    if metric in _WITH_CHANCE:
        handles.append(Line2D([], [], color="0.5", linestyle="--", linewidth=1))
        labels.append("chance")
    handles.append(Line2D([], [], color="0.6", linewidth=1))
    labels.append("train_len")
    handles.append(Line2D([], [], color="0.3", marker="x", linestyle="none", markersize=5))
    labels.append("does not compute")
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        ncols=columns,
        fontsize="small",
        frameon=False,
        title="mean over seeds, band min-max",
        title_fontsize="small",
    )


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 28, break_long_words=False, break_on_hyphens=False))
