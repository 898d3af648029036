"""The verbs: each turns a command line into calls of the modules below."""

import traceback
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from posx import hydra_app, runs
from posx.config import Config, from_node, loads
from posx.errors import UserError
from posx.progress import say
from posx.runs import Run

NOT_A_VARIANT = ("scheme", "task", "seed", "data_seed", "init", "results_dir", "device", "threads")


class RunFailed(Exception):
    """A run failed or was stopped; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def train(words: list[str]) -> None:
    """One run, or with -m a sweep; `words` are Hydra's overrides and flags.

    Raises:
        UserError: the words or the config are wrong.
        RunFailed: a run broke or was stopped; the others of a sweep were still trained.
    """
    failures: list[Exception] = []

    def job(node: DictConfig) -> float:
        """Never raises: Hydra would end the sweep. Returns the in-range error, for sweepers."""
        try:
            record = _train_one(node)
        except (UserError, RunFailed) as error:
            failures.append(error)
            return float("nan")
        return 1 - record["check"]["token_acc"]

    hydra_app.run(job, "train", words)
    for failure in failures[:-1]:
        say(f"posx: {failure}")
    if failures:
        raise failures[-1]


def _train_one(node: DictConfig) -> dict[str, Any]:
    """Train the run of one composed config, unless it is there already; returns its record."""
    from posx.train import Interrupted
    from posx.train import train as train_run

    hydra = HydraConfig.get()
    config = from_node(node, dict(hydra.runtime.choices))
    label = _label(config.scheme_name, list(hydra.overrides.task))
    results = Path(node.results_dir).absolute()
    parent = None
    if config.init is not None:
        parent, config = _parent(config)
    run = Run(
        runs.folder_of(
            results, config.task_name, config.scheme_name, config.seed, config.digest()
        )
    )
    with run.lock() as mine:
        if not mine:
            raise RunFailed(f"{run.folder}: another process is training this run; left alone")
        record = run.record() if (run.folder / "run.json").exists() else None
        if record is not None and record["status"] == "finished":
            say(f"already trained: {run.folder}")
        else:
            try:
                record = train_run(config, run, parent, label)
            except Interrupted as error:
                raise RunFailed(f"stopped by {error}; the same command goes on", 128 + error.number) from None
            except UserError:
                raise
            except Exception as error:
                raise RunFailed(_record_failure(run, error)) from error
    say(describe(record))
    say(f"  {run.folder}")
    return record


def _record_failure(run: Run, error: Exception) -> str:
    """Keep the traceback and the reason in the run folder; returns one sentence."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    runs.write_text(run.folder / "error.txt", "".join(traceback.format_exception(error)))
    if (run.folder / "run.json").exists():
        run.write_record(run.record() | {"status": "failed", "reason": reason})
    return f"{run.folder}: failed with {reason}; the traceback is in error.txt there"


def describe(record: dict[str, Any]) -> str:
    """One sentence on a finished run."""
    check = record["check"]
    return (
        f"{record['task']}/{record['scheme']} seed {record['seed']}: {record['steps']} steps, "
        f"{record['wall_s']:.0f} s, accuracy {check['token_acc']:.4f} (last tenth {check['tail_acc']:.4f}) at "
        f"{record['train_len']} tokens, converged: {'yes' if record['converged'] else 'no'}"
    )


def _label(scheme: str, overrides: list[str]) -> str:
    """The scheme's name and every override that makes this run another one than the default."""
    kept = [
        word for word in overrides if word.partition("=")[0].lstrip("+~") not in NOT_A_VARIANT
    ]
    return " ".join([scheme, *sorted(kept)])


def _parent(config: Config) -> tuple[Run, Config]:
    """The finished run that `init` names, and the config with its hash in place of its path."""
    parent = Run(Path(str(config.init)).absolute())
    record = parent.record()
    if record["status"] != "finished":
        raise UserError(f"init={config.init}: that run is {record['status']}, not finished")
    if record["scheme"] != config.scheme_name or record["task"] != config.task_name:
        raise UserError(
            f"init={config.init} is a run of scheme={record['scheme']} task={record['task']}; say so here too"
        )
    return parent, config.with_parent(record["hash"], record["train_len"])


def load_config(run: Run) -> Config:
    """The config that a run was trained with."""
    return loads(run.config_text(), str(run.folder))
