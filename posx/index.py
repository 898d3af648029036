"""The evaluations of many runs, as fast as one file can be read.

A report of thousands of runs would spend its time on opening as many eval.csv. Their rows are
therefore kept in one Parquet file as well, each with the stamp of the file that it was read from:

    <results>/.index/<digest>.parquet

This is no second truth. A row counts only while its eval.csv has that very stamp, a file whose
contents do not have the digest in its name counts as none, and whatever is missing is read from the
run folders. It may be deleted at any time, and where it cannot be written all goes on without it.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from posx import stats
from posx.errors import UserError
from posx.progress import say
from posx.runs import EVAL_DTYPES, Run, make_folder, write_atomic

BEHIND = 100  # so many tables read one by one are worth a new index
_DTYPES = {"folder": "object", "stamp": "object"} | EVAL_DTYPES


def evaluations(runs: Iterable[Run], results: Path) -> tuple[pd.DataFrame, dict[Run, str]]:
    """The rows of the runs' eval.csv, in the order of the runs.

    Returns:
        The rows with the columns of eval.csv, `folder` (as `name_of` gives it) and `stamp`; and for
        each run whose table cannot be read the reason. A run that was never evaluated has neither.
    """
    wanted = {name_of(run, results): run for run in runs}
    stamps = {name: stamp for name, run in wanted.items() if (stamp := _stamp(run))}
    index = _load(results)
    known = index[index["stamp"] == index["folder"].map(stamps)]
    unread = stamps.keys() - set(known["folder"].unique())
    if len(unread) >= BEHIND:
        say(f"posx: reading {len(unread)} evaluations; unchanged ones take no time the next time")
    columns: dict[str, list[Any]] = {name: [] for name in _DTYPES}
    broken = {}
    for name in sorted(unread):
        try:
            table = _table(wanted[name])
        except UserError as error:
            broken[wanted[name]] = str(error)
        else:
            for column in EVAL_DTYPES:
                columns[column] += table[column].tolist()
            columns["folder"] += [name] * len(table)
            columns["stamp"] += [stamps[name]] * len(table)
    rows = pd.concat([known, pd.DataFrame(columns).astype(_DTYPES)])
    if len(unread) >= BEHIND:
        others = index[~index["folder"].isin(wanted)]
        there = [(results / name).exists() for name in others["folder"]]
        _save(pd.concat([others[there], rows]), results)
    order = {name: number for number, name in enumerate(wanted)}
    return rows.sort_values("folder", key=lambda names: names.map(order), kind="stable"), broken


def _table(run: Run) -> pd.DataFrame:
    table = run.table("eval")
    if not table["verdict"].isin(stats.VERDICTS).all():
        path = run.folder / "eval.csv"
        raise UserError(f"{path} has an unknown verdict; delete it and evaluate the run again")
    return table


def name_of(run: Run, results: Path) -> str:
    """The run's folder: relative to `results` where it lies below it."""
    return str(run.folder).removeprefix(f"{results}{os.sep}")


def _stamp(run: Run) -> str:
    """What changes whenever a file is replaced or written to; empty where there is none. Nothing
    here is compared by size, so clocks may go backwards."""
    try:
        found = os.stat(f"{run.folder}/eval.csv")  # noqa: PTH116 (Path takes twice as long)
    except OSError:
        return ""
    parts = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return "-".join(f"{part:x}" for part in parts)


def _load(results: Path) -> pd.DataFrame:
    """The index, or an empty one where there is none that can be trusted."""
    for path in (results / ".index").glob("*.parquet"):
        with suppress(Exception):  # whatever is wrong with it, the run folders have it all
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem:
                import duckdb

                return duckdb.read_parquet(str(path)).df()[[*_DTYPES]].astype(_DTYPES)
    return pd.DataFrame(columns=[*_DTYPES]).astype(_DTYPES)


def _save(rows: pd.DataFrame, results: Path) -> None:
    import duckdb

    folder = results / ".index"
    with suppress(OSError, UserError, duckdb.Error):  # it only saves time
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "index"
            duckdb.from_df(rows).write_parquet(str(path), compression="zstd")
            data = path.read_bytes()
        make_folder(folder)
        path = folder / f"{hashlib.sha256(data).hexdigest()}.parquet"
        write_atomic(path, lambda file: file.write(data))
        for old in folder.iterdir():
            if old != path:
                old.unlink()
