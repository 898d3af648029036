"""What the seeds of a group say together: a cell a length, and the summary numbers of a curve.

Runs of one group (the same configuration with other seeds) are summarised together and runs of two
groups never. Within a group the seeds that did not learn train_len get a row of their own: nothing
is dropped, and what they do at longer lengths does not count for or against the scheme.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean, mode
from typing import Any

import pandas as pd

from posx import stats
from posx.collect import GROUP, Collected, Row
from posx.runs import NO_EXTENSION

CURVE = [*GROUP, "extension"]
_USED = (  # columns of an evaluation that the numbers here are made from, beside the metric
    *(*CURVE, "trained", "length", "folder", "computes", "status", "verdict", "chance", "skill"),
    *("sequences", "token_acc", "token_acc_lo", "token_acc_hi"),
)


def evaluations(data: Collected, metric: str) -> list[Row]:
    """What `cells` and `summarise` are made from."""
    return records(data.rows, {*_USED, metric})


def cells(rows: list[Row], metric: str = "token_acc") -> pd.DataFrame:
    """One row a (curve, trained or not, length): the metric over seeds, and both verdicts.

    min and max are empty with one seed: one value has no spread.
    """
    at = [*CURVE, "trained", "length"]
    parts = grouped(rows, at)
    found = [dict(zip(at, key, strict=True)) | _cell(part, metric) for key, part in parts.items()]
    columns = [*at, "n_seeds", "n_computing", "mean", "min", "max"]
    columns += ["chance", "verdict", "verdict_worst", "status"]
    return pd.DataFrame(found, columns=columns)


def _cell(part: list[Row], metric: str) -> Row:
    """The rows of one length, one a seed, as one."""
    good = [row for row in part if row["computes"]]
    return {
        "n_seeds": len(part),
        "n_computing": len(good),
        **_spread((row[metric] for row in good), "mean", "min", "max"),
        "chance": _mean(row["chance"] for row in part),
        "verdict": _pooled_verdict(part),
        "verdict_worst": stats.worst(row["verdict"] for row in part),
        "status": "ok" if good else mode(sorted(row["status"] for row in part)),
    }


def _pooled_verdict(part: list[Row]) -> str:
    """The verdict over the tokens of all seeds that compute."""
    good = [row for row in part if row["computes"]]
    if len(good) < 2:
        return good[0]["verdict"] if good else "cannot"
    _, lo, hi = stats.pool(good)
    skill_hi = stats.skill(hi, _mean(row["chance"] for row in good))
    return stats.verdict(True, lo, skill_hi, all(row["trained"] for row in good))


def summarise(rows: list[Row], known: pd.DataFrame) -> pd.DataFrame:
    """One row a (task, label, group, train_len, extension): seed counts and the summary numbers.

    performs_to and the factor are of the pooled seeds, with the worst seed's beside them. They, the
    effective length and AULC are over the seeds that learned train_len, and empty without one; a
    min and max is empty with one.
    """
    evaluated = grouped(rows, GROUP)
    found = []
    for key, runs in grouped(records(known, known), GROUP).items():
        curves = grouped(evaluated.get(key, []), ["extension"]) or {(NO_EXTENSION,): []}
        for (extension,), curve in curves.items():
            group = dict(zip(CURVE, (*key, extension), strict=True))
            found.append(group | _counts(runs, curve) | _headline(curve, group["train_len"]))
    return pd.DataFrame(found)


def _counts(runs: list[Row], curve: list[Row]) -> Row:
    steps = (run["steps"] for run in runs if run["converged"])
    return {
        "n_started": len(runs),
        "n_finished": sum(run["run_status"] == "finished" for run in runs),
        "n_converged": sum(run["converged"] for run in runs),
        "n_evaluated": len({row["folder"] for row in curve}),
        "n_untrained": len({row["folder"] for row in curve if not row["trained"]}),
        **_spread(steps, "steps", "steps_min", "steps_max"),
        "folders": ";".join(run["folder"] for run in runs),
    }


def _headline(curve: list[Row], train_len: int) -> Row:
    """The summary numbers of one extension of one group."""
    seeds = list(grouped(curve, ["folder"]).values())
    trained = [seed for seed in seeds if seed[0]["trained"]]
    learned = grouped((row for seed in trained for row in seed), ["length"])
    pooled = [
        {"length": length, "verdict": _pooled_verdict(part)} for (length,), part in learned.items()
    ]
    performs = [stats.performs_to(seed, train_len) for seed in trained]
    pooled_to = stats.performs_to(pooled, train_len) if trained else math.nan
    worst_to = min(performs, default=math.nan)
    effective = [stats.effective_length(seed, train_len) for seed in trained]
    computes = [stats.computes_to(seed, train_len) for seed in seeds]
    names = ("effective_length", "effective_length_min", "effective_length_max")
    aulc = (stats.aulc(seed, train_len) for seed in trained)
    return {
        "longest": max((row["length"] for row in curve), default=math.nan),
        "computes_to": min(computes, default=math.nan),
        "performs_to": pooled_to,
        "performs_to_worst": worst_to,
        **_spread((found.length for found in effective), *names),
        "effective_at_least": any(found.at_least for found in effective),
        "factor": pooled_to / train_len,
        "factor_worst": worst_to / train_len,
        **_spread(aulc, "aulc", "aulc_min", "aulc_max"),
    }


def long(data: Collected, metric: str) -> pd.DataFrame:
    """One row a (curve, trained or not, length): its cell, then the summary numbers of the curve.

    A group that was never evaluated has one row without a length.
    """
    rows = evaluations(data, metric)
    table = cells(rows, metric).assign(metric=metric)
    frame = summarise(rows, data.runs).merge(table, on=CURVE, how="left")
    first = [*CURVE, "trained", "length", "metric"]
    measured = [name for name in table if name not in first]
    ordered = [*first, *measured, *[name for name in frame if name not in (*first, *measured)]]
    frame["n_seeds"] = frame["n_seeds"].fillna(0).astype(int)
    return frame[ordered].astype({"length": "Int64"})


def curve_name(curve: Mapping[str, Any]) -> str:
    """The label, and the extension where there is one."""
    extension = curve["extension"]
    return curve["label"] if extension == NO_EXTENSION else f"{curve['label']} + {extension}"


def records(frame: pd.DataFrame, columns: Iterable[str]) -> list[Row]:
    """These columns of a frame as one dict a row; to_dict takes three times as long."""
    columns = [*columns]
    values = (frame[name].tolist() for name in columns)
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of the columns `by`, in the order of these.

    Plain dicts, because groupby takes longer to slice a frame into a thousand parts of three rows
    than all the arithmetic on them.
    """
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    key = itemgetter(*by, by[0])  # of one column alone it would be no tuple
    for row in rows:
        found[key(row)].append(row)
    return {key[:-1]: found[key] for key in sorted(found)}


def _spread(values: Iterable[float], mean: str, low: str, high: str) -> dict[str, float]:
    """Mean, min and max of a value over seeds; min and max only where there are several."""
    known = _known(values)
    several = len(known) > 1
    return {
        mean: fmean(known) if known else math.nan,
        low: min(known) if several else math.nan,
        high: max(known) if several else math.nan,
    }


def _mean(values: Iterable[float]) -> float:
    known = _known(values)
    return fmean(known) if known else math.nan


def _known(values: Iterable[float | None]) -> list[float]:
    """Those that are there: an empty cell is None or NaN."""
    return [float(value) for value in values if value is not None and value == value]
