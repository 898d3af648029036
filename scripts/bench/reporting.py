"""`posx report` of many runs, beside the mere reading of their tables."""

import io
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pandas as pd
from table import Row, ratio

from posx import commands
from posx.cost import interleave
from posx.runs import EVAL_COLUMNS, SCHEMA, TRAIN_COLUMNS, Run, folder_of

GROUP = "report"
LENGTHS = [64 * 2**k for k in range(8)]


def run(quick: bool, rounds: int) -> list[Row]:
    n_runs = 20 if quick else 200
    with tempfile.TemporaryDirectory() as name:
        results = Path(name)
        for number in range(n_runs):
            make_run(results, number)
        works = {
            "report": partial(report, results),
            "read": lambda: [pd.read_csv(path) for path in sorted(results.rglob("eval.csv"))],
        }
        times = interleave(works, rounds)
    what = f"posx report of {n_runs} runs, time by pandas reading their eval.csv"
    return [ratio(GROUP, what, "", times, "report", "read")]


def report(results: Path) -> str:
    with redirect_stdout(io.StringIO()) as out:
        commands.report(
            [], results, metric="token_acc", tasks=[], schemes=[], fmt="csv", output=None, plot=None
        )
    return out.getvalue()


def make_run(results: Path, number: int) -> None:
    """A finished run of one of ten schemes, with invented accuracies."""
    scheme, seed = f"scheme{number % 10}", number // 10
    run = Run(folder_of(results, "copy", scheme, seed, f"{number:08x}"))
    run.folder.mkdir(parents=True)
    record = {"schema": SCHEMA, "status": "finished", "reason": "", "scheme": scheme}
    record |= {"task": "copy", "seed": seed, "data_seed": 0, "train_len": 64, "label": scheme}
    record |= {"group": f"{number % 10:08x}", "hash": f"{number:08x}", "converged": True}
    record |= {"steps": 1000, "steps_to_target": 800, "parameters": 9, "wall_s": 1.5}
    run.write_record(record)
    run.write_table("train", pd.DataFrame(columns=list(TRAIN_COLUMNS)))
    rows = []
    for length in LENGTHS:
        accuracy = 64 / length
        row = dict.fromkeys(EVAL_COLUMNS, accuracy)
        row |= {"scheme": scheme, "extension": "none", "extension_keys": "", "task": "copy"}
        row |= {"seed": seed, "train_len": 64, "length": length, "items": (length - 3) // 2}
        row |= {"sequences": 100, "eval_seed": 0, "computes": True, "status": "ok", "reason": ""}
        row |= {"verdict": "performs" if length == 64 else "degrades", "path": "sdpa"}
        rows.append(row)
    run.write_table("eval", pd.DataFrame(rows))
