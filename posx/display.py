"""Plain tables on stdout: as wide as needed when piped, folded to the terminal otherwise."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 1000  # no terminal, no reason to fold


def out() -> Console:
    """The console for data. Emoji codes and markup in names are printed as they are."""
    console = Console(markup=False, emoji=False, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(markup=False, emoji=False, highlight=False, width=PIPED_WIDTH)
    )


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, columns named by the keys of the first; the last column takes the rest."""
    console = out()
    table = Table(
        box=box.SIMPLE_HEAD if console.encoding.startswith("utf") else box.ASCII, pad_edge=False
    )
    columns = list(rows[0])
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
