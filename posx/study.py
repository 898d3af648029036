"""Studies before they run: the grids in configs/experiment, and what a command would have to do."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from posx import hydra_app, job, runs
from posx.board import clock
from posx.display import out
from posx.engines.local import usable_cores
from posx.errors import UserError

LAUNCHER = ("hydra/launcher=", "hydra.launcher.")
STANDINGS = {
    "done": "done",
    "trained": "trained and not yet evaluated",
    "broken": "begun and not finished",
    "new": "to do",
    "refused": "refused",
}


def grid(path: Path) -> dict[str, str]:
    """The swept keys of an experiment and their values, as they would be typed."""
    params = OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params") or {}
    return {str(key): str(value) for key, value in params.items()}


def count(path: Path) -> int:
    """How many runs the grid of an experiment has.

    Raises:
        UserError: the file or one of its values does not parse.
    """
    try:
        words = [f"{key}={value}" for key, value in grid(path).items()]
        parsed = OverridesParser.create().parse_overrides(words)
    except Exception as error:  # YAML parsers and Hydra's grammar raise many classes
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    swept = [each for each in parsed if each.is_sweep_override()]
    return math.prod(len(list(each.sweep_string_iterator())) for each in swept)


class Survey:
    """A task function that looks and does nothing."""

    def __init__(self) -> None:
        self.begun = False
        self.found: list[tuple[str, dict[str, Any]]] = []  # standing, and what an estimate needs
        self.refused: list[str] = []
        self.results = Path()

    def __call__(self, node: DictConfig) -> float:
        self.begun = True
        self.results = Path(node.results_dir)
        try:
            each = job.prepare(node)
            config = each.config
            kind = {"task": config.task_name, "label": each.label, "train_len": config.train_len}
            self.found.append((job.standing(each), kind))
        except UserError as error:
            self.found.append(("refused", {}))
            self.refused.append(str(error))
        return float("nan")


def dry_run(words: list[str], workers: int | None) -> None:
    """Print what `posx train` with these words would have to do, and how long that takes."""
    survey = Survey()
    kept = [word for word in words if not word.startswith(LAUNCHER)]
    with tempfile.TemporaryDirectory() as folder:
        here = [f"hydra.sweep.dir={folder}", f"hydra.run.dir={folder}"]
        hydra_app.run(survey, "train", [*kept, "hydra/launcher=basic", *here])
    standings = Counter(standing for standing, _ in survey.found)
    told = [f"{standings[key]} {text}" for key, text in STANDINGS.items() if standings[key]]
    console = out()
    console.print(f"{len(survey.found)} runs: {', '.join(told)}")
    for reason, times in Counter(survey.refused).items():
        console.print(f"refused, {times} of them: {reason}")
    ahead = [kind for standing, kind in survey.found if standing in ("new", "broken")]
    if ahead:
        console.print(_time(ahead, survey.results, min(workers or usable_cores(), len(ahead))))


def _time(ahead: list[dict[str, Any]], results: Path, workers: int) -> str:
    """How long training takes, from what finished runs took: those alike, else those of the same
    task and length, else all."""
    records = runs.find(results)[0].values()
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return f"time: not known, as no run in {results} is finished"
    total, used = 0.0, Counter[str]()
    for kind in ahead:
        for keys, what in (
            (("task", "label", "train_len"), "runs of the same kind"),
            (("task", "train_len"), "runs of the same task and length"),
            ((), "all finished runs"),
        ):
            alike = [r["wall_s"] for r in finished if all(r[key] == kind[key] for key in keys)]
            if alike:
                total += fmean(alike)
                used[what] += 1
                break
    how = ", ".join(f"{n} by {what}" for what, n in used.items())
    return (
        f"time: about {clock(total / workers)} of training on {workers} "
        f"process{'es' if workers > 1 else ''}, from the mean of finished runs ({how})"
    )
