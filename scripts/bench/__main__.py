"""How fast posx is: beside what the machine can do, beside peers, and beside the goals.

.venv/bin/python scripts/bench [--quick] [--group NAME]

Everything is measured in turns in one process on one thread, so a busy machine slows all alike.
Writes results/bench/bench.csv and bench.md, one row a measurement. Peers come with
`pip install '.[bench]'`; one that is missing is said and left out.
"""

import time
from pathlib import Path
from typing import Annotated

import decoding
import long_eval
import machine
import reporting
import startup
import table
import torch
import training
import typer

GROUPS = {
    module.GROUP: module.run for module in (training, long_eval, decoding, startup, reporting)
}
RESULTS = Path(__file__).parent.parent.parent / "results" / "bench"


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Three minutes: fewer rounds, shorter.")
    ] = False,
    group: Annotated[
        list[str] | None, typer.Option(help=f"One or more of {', '.join(GROUPS)}; default: all.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of 7, or 3.")] = None,
    output: Annotated[Path, typer.Option(help="A folder for the tables.")] = RESULTS,
) -> None:
    """How fast posx is, beside the machine, peers and goals."""
    chosen = group or list(GROUPS)
    for name in chosen:
        if name not in GROUPS:
            raise typer.BadParameter(f"{name} is not known: use {', '.join(GROUPS)}")
    torch.set_num_threads(1)
    facts = machine.facts()
    rows: list[table.Row] = []
    for name in chosen:
        started = time.perf_counter()
        found = GROUPS[name](quick, rounds or (3 if quick else 7))
        for row in found:
            print(
                f"{row.reached:9.3g} {row.unit:3} {row.goal:8} {row.met:3} {row.what}", flush=True
            )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        rows += found
    table.write(output, rows, facts)


if __name__ == "__main__":
    typer.run(main)
