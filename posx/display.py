"""Plain tables on stdout: as wide as they need when piped, laid out to fit on a terminal.

A name is never cut and never broken: what does not fit beside the others goes below them.
"""

import csv
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console

GAP = 2  # blanks between columns
TEXT_WIDTH = 100  # running text is not set wider, however wide the terminal
KEY_WIDTH = 18
LISTS = ("table", "csv", "md")  # what a list can be printed as


def out() -> Console:
    """The console for data. Emoji codes and markup in names are printed as they are."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_rows(
    rows: Sequence[Mapping[str, Any]], below: Sequence[str] = (), fmt: str = "table"
) -> None:
    """One line a row, columns named by the keys of the first, in one of LISTS.

    Where that is wider than the terminal, the columns `below` go under their row, and where the
    others still do not fit, every value gets a line of its own.
    """
    console = out()
    texts = [{key: str(value) for key, value in row.items()} for row in rows]
    columns = list(texts[0])
    if fmt == "csv":
        writer = csv.DictWriter(console.file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(texts)
        return
    if fmt == "md":
        lines = [columns, ["---"] * len(columns), *(row.values() for row in texts)]
        for line in lines:
            console.print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |")
        return
    below = [column for column in below if column in columns]
    heads = [column for column in columns if column not in below]
    if _fits(console, _aligned(texts, columns)):
        _print_table(console, _aligned(texts, columns))
    elif below and _fits(console, lines := _aligned(texts, heads)):
        console.print(lines[0], style="bold")
        for line, row in zip(lines[1:], texts, strict=True):
            console.print(line)
            for column in below:
                if row[column]:
                    console.print(_wrapped(console, row[column], "    "))
    else:
        for row in texts:
            console.print(row[columns[0]], style="bold")
            print_pairs({key: row[key] for key in columns[1:] if row[key]}, indent="  ")


def print_fitting(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> list[str]:
    """One line a row, with as many columns as the terminal has room for, those in `first` before
    the others; returns the columns that were left out."""
    console = out()
    texts = [{key: str(value) for key, value in row.items()} for row in rows]
    columns = list(texts[0])
    chosen: list[str] = []
    for column in sorted(columns, key=lambda name: first.index(name) if name in first else 99):
        wider = [name for name in columns if name in (*chosen, column)]
        if not _fits(console, _aligned(texts, wider)):
            break
        chosen = wider
    _print_table(console, _aligned(texts, chosen or columns))
    return [column for column in columns if column not in (chosen or columns)]


def print_pairs(pairs: Mapping[str, Any], indent: str = "") -> None:
    """A key and its text a line; long texts go on below their beginning."""
    console = out()
    for key, value in pairs.items():
        console.print(_wrapped(console, str(value), f"{indent}{key:{KEY_WIDTH}} ", hang=True))


def print_text(text: str) -> None:
    """Paragraphs set to the width of the terminal; those with indented lines stay as they are."""
    console = out()
    paragraphs = [
        part if any(line.startswith(" ") for line in part.splitlines()) else _filled(console, part)
        for part in text.split("\n\n")
    ]
    console.print("\n\n".join(paragraphs))


def _filled(console: Console, text: str) -> str:
    return _wrapped(console, " ".join(text.split()), "")


def _wrapped(console: Console, text: str, before: str, hang: bool = False) -> str:
    """`text` behind `before`, broken between words where a terminal is too narrow. With `hang` the
    lines after the first stand as far in as `before` is wide."""
    if not console.is_terminal:
        return (before + text).rstrip()
    return textwrap.fill(
        text,
        min(console.width, TEXT_WIDTH),
        initial_indent=before,
        subsequent_indent=" " * len(before) if hang else before,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print_table(console: Console, lines: Sequence[str]) -> None:
    console.print(lines[0], style="bold")
    for line in lines[1:]:
        console.print(line)


def _fits(console: Console, lines: Sequence[str]) -> bool:
    return not console.is_terminal or max(map(cell_len, lines)) <= console.width


def _aligned(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """A line of names and one a row, columns flush left."""
    table = [list(columns), *([row[column] for column in columns] for row in rows)]
    widths = [max(cell_len(cell) for cell in column) for column in zip(*table, strict=True)]
    return [
        "".join(
            cell + " " * (width - cell_len(cell) + GAP)
            for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in table
    ]
