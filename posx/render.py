"""The tables of a report on a terminal: as many columns side by side as it has room for."""

import io
import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from posx.collect import Collected
from posx.grids import CAVEAT, LEGEND, NA, SUMMARY_LEGEND, Cell, Grid, grids, loose_ends

STYLES = {
    "performs": "green",
    "degrades": "yellow",
    "fails": "red",
    "untrained": "dim",
    "cannot": "magenta",
}

_PADDING = 1  # blanks right of a column
_GAP = _PADDING + 1  # blanks between columns: the box has one


def render(data: Collected, metric: str, console: Console) -> None:
    """Print the tables; a table wider than the console is continued below, name column repeated."""
    for grid in grids(data, metric):
        for table in _tables(grid, console):
            console.print(table, crop=False)
            console.print()
    for lines in (LEGEND, SUMMARY_LEGEND, CAVEAT):
        console.print(Text("\n".join(lines)))
        console.print()
    ends = loose_ends(data)
    if ends:
        console.print(Text("Runs that are not finished, not evaluated or left out:"))
    for sentence in ends:
        console.print(Text(_printable(sentence, console.encoding)), soft_wrap=True)


def rendered(data: Collected, metric: str, width: int) -> str:
    """What `render` prints to a file of that width."""
    file = io.StringIO()
    render(data, metric, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def encodable(text: str, encoding: str) -> str:
    """The text with escapes for what a stream of this encoding cannot show."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _printable(text: str, encoding: str) -> str:
    """`encodable`, and with escapes for control characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return encodable(text, encoding)


def _tables(grid: Grid, console: Console) -> list[Table]:
    rows = [(_printable(name, console.encoding), _shown(cells)) for name, cells in grid.rows]
    grid = replace(grid, rows=rows)
    widths = [_column_width(grid, index) for index in range(len(grid.heads))]
    first = _name_width(grid, console.width, sum(width + _GAP for width in widths) + _PADDING)
    pages = _pages(widths, console.width - first) or [[]]
    tables = []
    for number, page in enumerate(pages, 1):
        part = f" ({number} of {len(pages)})" if len(pages) > 1 else ""
        tables.append(_table(grid, page, first, widths, part))
    return tables


def _shown(cells: list[Cell]) -> list[Cell]:
    """The cells of a row, without their spreads where no cell has one: there is one seed."""
    if any(cell.spread not in ("", NA) for cell in cells if cell.verdict != "cannot"):
        return cells
    return [replace(cell, spread="") if cell.spread == NA else cell for cell in cells]


def _table(grid: Grid, page: list[int], first: int, widths: list[int], part: str) -> Table:
    table = Table(
        title=Text(grid.title + part, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, _PADDING, 0, 0),
        # Its own width, so that a name longer than the console is printed and not squeezed.
        width=first + sum(widths[index] + _GAP for index in page) + _PADDING,
    )
    table.add_column(Text("\n".join(grid.corner)), width=first, overflow="fold")
    for index in page:
        head = Text("\n".join(grid.heads[index]))
        table.add_column(head, width=widths[index], justify="right", overflow="fold")
    for name, row in grid.rows:
        table.add_row(Text(name), *[_Lines(row[index]) for index in page])
    return table


class _Lines:
    """The lines of a cell at the right of its column, as Text would have them in a third of the
    time: a report may have ten thousand cells."""

    def __init__(self, cell: Cell) -> None:
        self.lines = [(cell.value, STYLES.get(cell.verdict, ""))]
        if cell.spread:
            self.lines.append((cell.spread, f"{self.lines[0][1]} dim"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = options.max_width
        for text, style in self.lines:
            for line in textwrap.wrap(text, width) if len(text) > width else [text]:
                yield Segment(line.rjust(width), console.get_style(style))
                yield Segment.line()


def _name_width(grid: Grid, console_width: int, others: int) -> int:
    """Wide enough for every word, and as wide as leaves all other columns in one table; where that
    is too narrow, whole names as far as they leave more than half of the console."""
    texts = [*grid.corner, *[name for name, _ in grid.rows]]
    whole = max(cell_len(text) for text in texts)
    word = max((cell_len(word) for text in texts for word in text.split()), default=0)
    room = console_width - others
    return min(whole, room if room >= word else max(word, console_width * 2 // 5))


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
        need = width + _GAP
        if not pages or need > left:
            pages.append([])
            left = room - _PADDING
        pages[-1].append(index)
        left -= need
    if len(pages) < 2:
        return pages
    even = math.ceil(len(widths) / len(pages))
    indices = iter(range(len(widths)))
    balanced = [list(islice(indices, even)) for _ in pages]
    fits = all(sum(widths[i] + _GAP for i in page) <= room - _PADDING for page in balanced)
    return [page for page in balanced if page] if fits else pages
