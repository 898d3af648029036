"""Which runs a report is about, and all that they say, as data frames.

Rows stay long, one fact a line; `summary` puts seeds together and `grids` makes wide tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from posx.catalog import nearest
from posx.errors import UserError
from posx.index import evaluations, name_of
from posx.runs import EVAL_COLUMNS, EVAL_DTYPES, Record, Run

METRICS = [name for name, kind in EVAL_DTYPES.items() if kind == "float64" and name != "chance"]
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
    runs: Mapping[Run, Record],
    results_dir: Path,
    tasks: Sequence[str] = (),
    schemes: Sequence[str] = (),
) -> Collected:
    """Read the runs of these tasks and schemes; every row of their eval.csv is a row out.

    A row is an eval.csv row with label, group, converged, folder and `trained`: whether the run
    learned its train_len, as its own verdicts say. Folders are relative to `results_dir` where they
    lie below it.

    Raises:
        UserError: a filter without a match, or no run that can be read.
    """
    chosen = select(runs, tasks, schemes)
    rows, broken = evaluations(chosen, results_dir)
    left_out = [" ".join(text.split()).removeprefix(f"{results_dir}/") for text in broken.values()]
    readable = [run for run in chosen if run not in broken]
    if not readable:
        raise UserError(f"no run can be read: {left_out[0]}")
    known = pd.DataFrame([_inventory(run, runs[run], results_dir) for run in readable])
    # A command that spells out a default makes the same configuration: the shortest label will do.
    shortest: dict[str, str] = {}
    for group, label in zip(known["group"], known["label"], strict=True):
        shortest[group] = min(shortest.get(group, label), label, key=len)
    known["label"] = known["group"].map(shortest)
    known["label"] = _distinct_labels(known)
    of_run = known[[*GROUP, "converged", "folder"]]
    untrained = rows.loc[rows["verdict"] == "untrained", "folder"].unique()
    own = ["folder", *(name for name in EVAL_COLUMNS if name not in GROUP)]
    rows = rows[own].merge(of_run, on="folder", how="left")
    rows["trained"] = ~rows["folder"].isin(untrained)
    columns = [*EVAL_COLUMNS, "label", "group", "converged", "folder", "trained"]
    return Collected(known, rows[columns], left_out)


def select(
    records: Mapping[Run, Record], tasks: Sequence[str], schemes: Sequence[str]
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


def _inventory(run: Run, record: Record, results_dir: Path) -> Row:
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
        "folder": name_of(run, results_dir),
    }


def _label(record: Record) -> str:
    return record.get("label") or record["scheme"]


def _distinct_labels(known: pd.DataFrame) -> list[str]:
    """Labels that tell groups apart: where two share one, the start of the group is added."""
    groups = known.groupby(["task", "train_len", "label"])["group"]
    shared = groups.transform("nunique") > 1
    return [
        f"{label} #{group[:6]}" if clash else label
        for label, group, clash in zip(known["label"], known["group"], shared, strict=True)
    ]
