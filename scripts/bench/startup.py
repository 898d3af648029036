"""Start-up: help against an empty Typer app, and what it imports."""

import subprocess
import sys
from functools import partial

from table import Row, ratio

from posx.cost import interleave

GROUP = "start-up"
EMPTY = """
import typer
app = typer.Typer(rich_markup_mode=None)
@app.command()
def main() -> None:
    "Nothing."
app(["--help"])
"""
HELP = "from posx.cli import app; app({words})"
IMPORTED = """
import sys
from posx.cli import app
try: app(["report", "--help"])
except SystemExit: pass
print(len({"torch", "pandas", "hydra"} & set(sys.modules)))
"""


def run(quick: bool, rounds: int) -> list[Row]:
    times = interleave(
        {
            "empty": partial(python, EMPTY),
            "help": partial(python, HELP.format(words=["--help"])),
            "report": partial(python, HELP.format(words=["report", "--help"])),
        },
        3 * rounds,
    )
    heavy = float(python(IMPORTED).splitlines()[-1])
    what = "posx report --help: of torch, pandas and hydra, imported"
    return [
        ratio(GROUP, "posx --help, time by an empty Typer app", "<= 1.3", times, "help", "empty"),
        ratio(GROUP, "posx report --help, time by the same", "", times, "report", "empty"),
        Row(GROUP, what, "<= 0", heavy, unit=""),
    ]


def python(code: str) -> str:
    """What the code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
