"""Compare runs: read them, and print, write or draw what they say."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from posx.collect import METRICS, Collected, collect, one_of
from posx.errors import UserError
from posx.export import LONG_FORMATS, export
from posx.plot import draw
from posx.progress import say
from posx.render import encodable, render, rendered
from posx.runs import Record, Run, write_atomic

FORMATS = ("table", "csv", "md", "latex", "json", "html")


def report(
    runs: Mapping[Run, Record],
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
    """Print or write the comparison of `runs`, as `runs.find` gives them, and draw it where `plot`
    is given.

    A run that cannot be read does not stop the others: it is named below the tables, and on stderr
    by the formats that have no place for it.

    Returns:
        The files that were written.

    Raises:
        UserError: no runs, a filter without a match, an unknown metric or format.
    """
    console = console or Console()
    if not runs:
        raise UserError(f"no runs in {results_dir}: train one with `posx train scheme=rope`")
    one_of("metric", metric, METRICS)
    one_of("format", fmt, FORMATS)
    data = collect(runs, results_dir, tasks, schemes)
    _check_values(data, metric)
    if fmt in LONG_FORMATS:
        for reason in data.left_out:
            say(f"posx: left out: {reason}")
    written = []
    if plot is not None:
        draw(data, plot, metric)
        written.append(plot)
    if output is not None:
        text = _text(data, metric, fmt, console.width)
        write_atomic(output, lambda file: file.write(text.encode()))
        written.append(output)
    elif fmt == "table":
        render(data, metric, console)
    else:
        console.file.write(encodable(export(data, metric, fmt), console.encoding))
    if data.rows.empty:
        say("none of these runs is evaluated yet: `posx eval` does it")
    return written


def _text(data: Collected, metric: str, fmt: str, width: int) -> str:
    """What a file of this format holds."""
    return rendered(data, metric, width) if fmt == "table" else export(data, metric, fmt)


def _check_values(data: Collected, metric: str) -> None:
    """Refuse a metric that these runs were not evaluated for.

    Raises:
        UserError: the column is empty although something was computed.
    """
    rows = data.rows
    if rows["computes"].any() and rows[metric].isna().all():
        filled = [name for name in METRICS if rows[name].notna().any()]
        raise UserError(f"no evaluation here has a {metric}; there is {', '.join(filled)}")
