"""`posx report` of as many runs as a laboratory has, each with ten evaluated lengths."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pandas as pd
from table import Row

from posx.runs import EVAL_COLUMNS, SCHEMA, TRAIN_COLUMNS, Run, folder_of

GROUP = "report"
LENGTHS = [64 * 2**k for k in range(10)]
SEEDS = 10
COMMAND = """
import atexit, sys
from pathlib import Path
from posx.cli import app

@atexit.register
def tell() -> None:  # what the system counts for a child has its parent's memory in it
    lines = Path("/proc/self/status").read_text().splitlines()
    print(*[line for line in lines if line.startswith("VmHWM")], file=sys.stderr)

app(sys.argv[1:])
"""


def run(quick: bool, rounds: int) -> list[Row]:
    n_runs = 1000 if quick else 10_000
    with tempfile.TemporaryDirectory() as name:
        results = Path(name)
        for number in range(n_runs):
            make_run(results, number, n_runs)
        first, _ = report(results, "csv")
        found = {fmt: [report(results, fmt) for _ in range(rounds)] for fmt in ("table", "csv")}
    size = f"{n_runs} runs, {n_runs * len(LENGTHS)} evaluations, {n_runs // SEEDS} curves"
    rows = [Row(GROUP, f"posx report --format csv of {size}: the first time", "", first, unit="s")]
    for fmt, each in found.items():
        seconds, mib = zip(*each, strict=True)
        what = f"posx report --format {fmt} of {size}"
        rows += [
            Row(GROUP, what, "<= 3", median(seconds), min(seconds), max(seconds), unit="s"),
            Row(GROUP, f"{what}: memory", "<= 1024", median(mib), unit="MiB"),
        ]
    return rows


def report(results: Path, fmt: str) -> tuple[float, float]:
    """Wall seconds and peak MiB of the command in a process of its own."""
    words = ["report", "--results-dir", str(results), "--format", fmt]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], check=True, capture_output=True, text=True
    )
    return time.perf_counter() - started, int(done.stderr.split()[-2]) / 1024


def make_run(results: Path, number: int, n_runs: int) -> None:
    """A finished run of one of many configurations, SEEDS of each, with invented accuracies."""
    seed, config = divmod(number, n_runs // SEEDS)
    task = ("copy", "sort")[config % 2]
    scheme = f"scheme{config // 2}"
    run = Run(folder_of(results, task, scheme, seed, f"{number:08x}"))
    run.folder.mkdir(parents=True)
    record = {"schema": SCHEMA, "status": "finished", "reason": "", "scheme": scheme}
    record |= {"task": task, "seed": seed, "data_seed": 0, "train_len": 64, "label": scheme}
    record |= {"group": f"{config:08x}", "hash": f"{number:08x}", "converged": True}
    record |= {"steps": 1000, "steps_to_target": 800, "parameters": 9, "wall_s": 1.5}
    run.write_record(record)
    run.write_table("train", pd.DataFrame(columns=list(TRAIN_COLUMNS)))
    rows = []
    for length in LENGTHS:
        accuracy = min(1, 64 / length * (1 + number % 7 / 8))
        row = dict.fromkeys(EVAL_COLUMNS, accuracy)
        row |= {"scheme": scheme, "extension": "none", "extension_keys": "", "task": task}
        row |= {"seed": seed, "train_len": 64, "length": length, "items": (length - 3) // 2}
        row |= {"sequences": 100, "eval_seed": 0, "computes": True, "status": "ok", "reason": ""}
        row |= {"verdict": "performs" if length == 64 else "degrades", "path": "sdpa"}
        rows.append(row)
    run.write_table("eval", pd.DataFrame(rows))
