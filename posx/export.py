"""A report as the text of a file: csv, json, Markdown, LaTeX and HTML."""

import html
import json
import re
from collections.abc import Iterable

import pandas as pd

from posx.collect import Collected
from posx.grids import CAVEAT, LEGEND, SUMMARY_LEGEND, Cell, Grid, grids, loose_ends
from posx.summary import long

LONG_FORMATS = ("csv", "json")  # they have no notes


def export(data: Collected, metric: str, fmt: str) -> str:
    """The report as text.

    csv and json are long: one row a (curve, trained or not, length), with the metric over seeds,
    both verdicts, and the summary numbers of the curve repeated on each of its rows. A group that
    was never evaluated has one row without a length. md, latex and html have the printed tables.
    """
    if fmt == "csv":
        return long(data, metric).to_csv(index=False, lineterminator="\n")
    if fmt == "json":
        return _json(long(data, metric))
    notes = [*LEGEND, *SUMMARY_LEGEND, " ".join(CAVEAT), *loose_ends(data)]
    writers = {"md": _markdown, "latex": _latex, "html": _html}
    return writers[fmt](grids(data, metric), notes)


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
    return "\n\n".join([*parts, "\n".join(f"- {escape(note)}" for note in notes)]) + "\n"


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
    items = [rf"\item {escape(note)}" for note in notes]
    parts.append("\n".join([r"\begin{itemize}", *items, r"\end{itemize}"]))
    return "\n\n".join(parts) + "\n"


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
    parts += ["<ul>", *[f"<li>{escape(note)}</li>" for note in notes], "</ul>"]
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
