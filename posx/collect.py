"""Which runs a report is about, and all that they say, as data frames.

Rows stay long, one fact a line; `summary` puts seeds together and `grids` makes wide tables.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from posx import stats
from posx.catalog import nearest
from posx.errors import UserError
from posx.runs import EVAL_COLUMNS, Run

# Columns of eval.csv that say which evaluation a row is, or are text: no metric.
_NOT_METRICS = {
    *("scheme", "extension", "extension_keys", "task", "seed", "train_len", "length", "items"),
    *("sequences", "eval_seed", "computes", "status", "reason", "chance", "verdict", "path"),
}
METRICS = [name for name in EVAL_COLUMNS if name not in _NOT_METRICS]
SHARES = {  # the metrics from 0 to 1
    *(name for name in METRICS if name.startswith(("token_acc", "exact_match", "acc_"))),
    *("first_error", "skill", "generated_acc"),
}
WITH_CHANCE = {"token_acc", "generated_acc"}  # the metrics that the `chance` column is about

GROUP = ["task", "train_len", "label", "group", "scheme"]  # the same configuration, any seed

Row = dict[str, Any]


@dataclass(frozen=True)
class Collected:
    """All that a report is made from."""

    runs: pd.DataFrame  # one row a run
    rows: pd.DataFrame  # one row an evaluation
    left_out: list[str]  # one sentence a run that cannot be read


def collect(
    runs: Sequence[Run], results_dir: Path, tasks: Sequence[str] = (), schemes: Sequence[str] = ()
) -> Collected:
    """Read the runs of these tasks and schemes; every row of their eval.csv is a row out.

    A row is an eval.csv row with label, group, converged, folder and `trained`: whether the run
    learned its train_len, as its own verdicts say. Folders are relative to `results_dir` where they
    lie below it.

    Raises:
        UserError: a filter without a match, or no run that can be read.
    """
    left_out: list[str] = []
    records = _readable(runs, Run.record, left_out)
    tables = _readable(select(records, tasks, schemes), _evaluations, left_out)
    known = pd.DataFrame([_inventory(run, records[run], results_dir) for run in tables])
    # A command that spells out a default makes the same configuration: the shortest label will do.
    known["label"] = known.groupby("group")["label"].transform(lambda labels: min(labels, key=len))
    known["label"] = _distinct_labels(known)
    rows = []
    for run, table in zip(known.to_dict("records"), tables.values(), strict=True):
        trained = all(row["verdict"] != "untrained" for row in table)
        added = {name: run[name] for name in (*GROUP, "converged", "folder")}
        rows += [{**row, **added, "trained": trained} for row in table]
    columns = [*EVAL_COLUMNS, "label", "group", "converged", "folder", "trained"]
    frame = pd.DataFrame(rows, columns=columns).astype({"computes": bool, "trained": bool})
    return Collected(known, frame, [text.removeprefix(f"{results_dir}/") for text in left_out])


def select(
    records: Mapping[Run, Mapping[str, Any]], tasks: Sequence[str], schemes: Sequence[str]
) -> list[Run]:
    """The runs of these tasks and these schemes (or variant labels); all where none are named.

    Raises:
        UserError: a name that no run has, or a combination that no run has.
    """
    for name in tasks:
        one_of("task", name, {record["task"] for record in records.values()})
    names = {run: {record["scheme"], _label(record)} for run, record in records.items()}
    for name in schemes:
        one_of("scheme", name, set().union(*names.values()))
    chosen = [
        run
        for run, record in records.items()
        if (not tasks or record["task"] in tasks) and (not schemes or names[run] & {*schemes})
    ]
    if not chosen:
        pairs = {f"{record['task']} with {record['scheme']}" for record in records.values()}
        raise UserError(
            f"no run of task {', '.join(tasks)} with scheme {', '.join(schemes)}; "
            f"there is {'; '.join(sorted(pairs))}"
        )
    return chosen


def one_of(kind: str, given: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not there.

    Raises:
        UserError: names the nearest and all that exist.
    """
    allowed = sorted(allowed)
    if given not in allowed:
        hint = nearest(given, allowed)
        raise UserError(f"unknown {kind} {given}{hint}; there is {', '.join(allowed)}")


def _readable(
    runs: Iterable[Run], read: Callable[[Run], Any], left_out: list[str]
) -> dict[Run, Any]:
    """What `read` finds in each run; of those where it cannot, the reason goes to `left_out`.

    Raises:
        UserError: it can in none.
    """
    found = {}
    for run in runs:
        try:
            found[run] = read(run)
        except UserError as error:
            left_out.append(" ".join(str(error).split()))
    if not found:
        raise UserError(f"no run can be read: {left_out[0]}")
    return found


def _evaluations(run: Run) -> list[Row]:
    """The rows of eval.csv.

    Raises:
        UserError: it cannot be read or is damaged.
    """
    table = run.table("eval")
    numbers = ("train_len", "length", "sequences", "chance", *METRICS)
    kinds = {name: dtype.kind for name, dtype in table.dtypes.items()}
    damaged = [name for name in numbers if kinds[name] not in "iuf"]
    damaged += [] if kinds["computes"] == "b" else ["computes"]
    damaged += [] if table["verdict"].isin(stats.VERDICTS).all() else ["verdict"]
    if len(table) and damaged:
        raise UserError(
            f"{run.folder / 'eval.csv'} is damaged ({', '.join(damaged)}); delete it and evaluate "
            "the run again"
        )
    # to_dict takes ten times as long on the few rows of a run
    columns = [table[name].tolist() for name in EVAL_COLUMNS]
    return [dict(zip(EVAL_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]


def _inventory(run: Run, record: Mapping[str, Any], results_dir: Path) -> Row:
    below = run.folder.is_relative_to(results_dir)
    return {
        "task": record["task"],
        "train_len": record["train_len"],
        "label": _label(record),
        "group": str(record["group"]),
        "scheme": record["scheme"],
        "seed": record["seed"],
        "run_status": record["status"],
        "run_reason": record.get("reason") or "",
        "converged": record.get("converged") is True,
        "steps": record.get("steps"),
        "folder": str(run.folder.relative_to(results_dir) if below else run.folder),
    }


def _label(record: Mapping[str, Any]) -> str:
    return record.get("label") or record["scheme"]


def _distinct_labels(known: pd.DataFrame) -> list[str]:
    """Labels that tell groups apart: where two share one, the start of the group is added."""
    groups = known.groupby(["task", "train_len", "label"])["group"]
    shared = groups.transform("nunique") > 1
    return [
        f"{label} #{group[:6]}" if clash else label
        for label, group, clash in zip(known["label"], known["group"], shared, strict=True)
    ]
