"""Fill the table of a run: which cells it should have, which are missing, one after the other.

Each cell is written as soon as it is there, so an interrupted evaluation loses at most one.
"""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from posx import build, stats
from posx.build import Extension
from posx.config import Config, loads
from posx.device import DTYPES, pick_device, weight_dtype
from posx.errors import UserError
from posx.lengths import DEFAULT, Lengths
from posx.measure import Budget, measure, n_sequences
from posx.progress import Bar, say
from posx.runs import EVAL_COLUMNS, NO_EXTENSION, Run
from posx.tasks.base import Task


@dataclass(frozen=True)
class Plan:
    """The cells that one run should have."""

    run: Run
    config: Config
    cells: list[tuple[Extension | None, int]]


def plan(
    run: Run, lengths: Lengths | None, extensions: list[Extension], trusted: tuple[str, ...]
) -> Plan:
    """All cells of a run, checked before any work; the default lengths that its task can make when
    `lengths` is None.

    The training length is always among them, also without an extension: verdicts rest on it.

    Raises:
        UserError: the run cannot be rebuilt, its task cannot make a length, or an extension does
            not apply to its scheme.
    """
    config = loads(run.config_text(), str(run.folder))
    build.check_trust(config, trusted)
    for extension in extensions:
        extension.check(config.scheme)
    return plan_of(run, config, lengths, list(extensions or [None]))


def plan_of(
    run: Run, config: Config, lengths: Lengths | None, extensions: list[Extension | None]
) -> Plan:
    """The same of a config that is known, also before there is a run; None among the extensions
    stands for the plain scheme.

    Raises:
        UserError: the task cannot make a length, or the run is trained under an extension already.
    """
    task = build.make_task(config)
    if lengths is None:
        wanted = [n for n in DEFAULT.of(config.train_len) if task.can_make(n)]
    else:
        wanted = lengths.of(config.train_len)
        for length in wanted:
            task.check_length(length)
    if config.extension is not None and any(extensions):
        raise UserError(
            f"{run.folder} was trained under extension={config.extension['name']}: another one on "
            "top of it is not defined; evaluate it without --extend"
        )
    wanted = sorted({config.train_len, *wanted})
    cells: list[tuple[Extension | None, int]] = [(None, config.train_len)]
    for extension in extensions:
        cells += [(extension, length) for length in wanted if (extension, length) != cells[0]]
    return Plan(run, config, cells)


def fill(plan: Plan, budget: Budget, again: bool) -> bool:
    """Compute the missing cells of a run, or all of them `again`; False where another process is
    working on it.

    Raises:
        UserError: the weights are missing or do not fit.
    """
    config, run = plan.config, plan.run
    with run.lock() as mine:
        if not mine:
            say(f"{run.folder}: another process is working on this run; left alone")
            return False
        run.clean()
        table = run.table("eval")
        missing = plan.cells if again else missing_cells(plan, budget, table)
        if not missing:
            return True
        task = build.make_task(config)
        record = run.record()
        torch.set_num_threads(config.threads)
        model = build.make_model(config, task)
        build.load_weights(model, run)
        model.to(_device(config), weight_dtype(DTYPES[config.dtype]))
        title = f"{config.task_name}/{record['label']} seed {config.seed}"
        with Bar(title, len(missing), doing="evaluates") as bar:
            for done, (extension, length) in enumerate(missing):
                name = _name(extension)
                facts = {"length": f"{length}"}
                bar.update(done, facts if extension is None else {**facts, "extension": name})
                asked = _asked(plan, extension, length, budget)
                cell = measure(model, task, config, length, asked, extension, record["steps"])
                row = {
                    "scheme": config.scheme_name,
                    "extension": name,
                    "extension_keys": _keys(extension),
                    "task": config.task_name,
                    "seed": config.seed,
                    "train_len": config.train_len,
                    **cell,
                }
                table = _with_row(table, row)
                run.write_table("eval", table)
            bar.update(len(missing), {})
    for name, rows in table.groupby("extension"):
        say(f"{title}{'' if name == NO_EXTENSION else f' + {name}'}: {_line(rows)}")
    seen = table[table["overlap"] > 0]
    for _, row in seen.iterrows():
        say(
            f"{title}: {row['overlap']:.0f} of {row['sequences']} sequences of {row['length']} "
            "tokens were drawn in training too"
        )
    return True


def missing_cells(
    plan: Plan, budget: Budget, table: pd.DataFrame
) -> list[tuple[Extension | None, int]]:
    """The cells of a plan that `table`, the eval.csv of its run, does not have as asked for."""
    task = build.make_task(plan.config)
    return [
        cell for cell in plan.cells if not _has(table, *cell, task, _asked(plan, *cell, budget))
    ]


def _asked(plan: Plan, extension: Extension | None, length: int, budget: Budget) -> Budget:
    """The budget of a cell: the training length has its full number of sequences, as a quick look
    at it cannot tell whether a run is trained."""
    if extension is None and length == plan.config.train_len:
        return replace(budget, sequences=None)
    return budget


def _device(config: Config) -> torch.device:
    """The device of the run, or any where that one is not there."""
    try:
        return pick_device(config.device)
    except UserError:
        return pick_device("auto")


def _line(rows: pd.DataFrame) -> str:
    """Accuracy and verdict at every length, on one line."""
    cells = []
    for row in rows.to_dict("records"):
        computes = bool(row["computes"])
        accuracy = f"{row['token_acc']:.3f} {row['verdict']}" if computes else row["status"]
        cells.append(f"{row['length']} {accuracy}")
    return ", ".join(cells)


def _name(extension: Extension | None) -> str:
    return NO_EXTENSION if extension is None else extension.name


def _keys(extension: Extension | None) -> str:
    """The extension's parameters as text."""
    parameters = {} if extension is None else extension.parameters
    return " ".join(f"{key}={value}" for key, value in parameters.items())


def _has(
    table: pd.DataFrame, extension: Extension | None, length: int, task: Task, budget: Budget
) -> bool:
    """Whether a cell is there as asked for. One that failed by an error, or for want of memory or
    of less time than there is now, is tried again."""
    rows = table[(table["extension"] == _name(extension)) & (table["length"] == length)]
    if rows.empty:
        return False
    row = rows.iloc[0]
    keys = "" if pd.isna(row["extension_keys"]) else row["extension_keys"]
    if row["eval_seed"] != budget.seed or keys != _keys(extension):
        return False
    if row["status"] == "over_time":
        return row["seconds"] >= budget.max_seconds
    if row["status"] != "ok":
        return row["status"] not in ("over_memory", "error")
    if row["sequences"] < n_sequences(task, length, budget):
        return False
    return not (budget.generate and pd.isna(row["generated_acc"]))


def _with_row(table: pd.DataFrame, row: dict[str, Any]) -> pd.DataFrame:
    """The table with the row in the place of an older one, sorted, verdicts brought up to date."""
    others = table[
        (table["extension"] != row["extension"]) | (table["length"] != row["length"])
    ].to_dict("records")
    rows = sorted(
        [*others, row],
        key=lambda row: (row["extension"] != NO_EXTENSION, row["extension"], row["length"]),
    )
    at_train_len = [
        row for row in rows if (row["extension"], row["length"]) == (NO_EXTENSION, row["train_len"])
    ]
    trained = (
        bool(at_train_len)
        and at_train_len[0]["computes"]
        and stats.is_trained(at_train_len[0]["token_acc_lo"])
    )
    for each in rows:
        computes = bool(each["computes"])
        skill_high = stats.skill(each["token_acc_hi"], each["chance"]) if computes else 0.0
        low = each["token_acc_lo"] if computes else 0.0
        each["verdict"] = stats.verdict(computes, low, skill_high, trained)
    return pd.DataFrame(rows, columns=list(EVAL_COLUMNS))
