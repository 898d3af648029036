"""The job of `posx train`: from the words of the command line to trained runs."""

import os
import traceback
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from posx import hydra_app, runs
from posx.build import typed
from posx.config import Config, from_node, loads
from posx.errors import RunFailed, UserError
from posx.progress import say
from posx.runs import Run

SIGNALLED = 128  # exit codes above it say which signal asked to stop
NOT_A_VARIANT = ("scheme", "task", "seed", "data_seed", "init", "results_dir", "device", "threads")


def run_jobs(words: list[str]) -> None:
    """One run, or with -m a sweep; `words` are Hydra's overrides and flags.

    Raises:
        UserError: the words or the config are wrong.
        RunFailed: a run broke or was stopped; the others of a sweep were still trained.
    """
    here = os.getpid()
    done: list[str] = []
    failures: list[tuple[str, UserError | RunFailed]] = []

    def job(node: DictConfig) -> float:
        """Returns the in-range error, for sweepers. Raises only where Hydra does not end the sweep
        for it, that is in the process of a launcher, or when the user asked to stop."""
        name = _swept(words)
        done.append(name)
        try:
            record = _train_one(node)
        except (UserError, RunFailed) as error:
            failures.append((name, error))
            if os.getpid() != here:
                say(f"posx: {name}: {error}")
                raise
            if error.code > SIGNALLED:
                raise KeyboardInterrupt from None
            return float("nan")
        return 1 - record["check"]["token_acc"] if record else float("nan")

    try:
        hydra_app.run(job, "train", words)
    except KeyboardInterrupt:
        if not failures:
            raise
    if not failures:
        return
    if len(done) == 1:
        raise failures[0][1]
    for name, error in failures:
        say(f"posx: {name}: {error}")
    code = max(failures, key=lambda failure: failure[1].code)[1].code
    raise RunFailed(
        f"{len(failures)} of {len(done)} runs failed: {'; '.join(name for name, _ in failures)}",
        code if code > SIGNALLED else 1,
    )


def _swept(words: list[str]) -> str:
    """What makes this run of a sweep differ from the others, such as `scheme=rope seed=1`."""
    return " ".join(word for word in _overrides() if word not in words)


def _overrides() -> list[str]:
    """The overrides of the job that Hydra is running, as they were typed."""
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word) for word in typed or ()]


def _train_one(node: DictConfig) -> dict[str, Any] | None:
    """Train the run of one composed config, unless it is there already; returns its record, or None
    where another process is at it."""
    from posx.train import Interrupted
    from posx.train import train as train_run

    hydra = HydraConfig.get()
    sources = [Path(each.path) for each in hydra.runtime.config_sources if each.schema == "file"]
    config = typed(from_node(node, dict(hydra.runtime.choices)), *sources)
    label = _label(config.scheme_name, _overrides())
    results = Path(node.results_dir).absolute()
    parent = None
    if config.init_len is not None:
        raise UserError("init_len follows from init=RUN: leave it out")
    if config.init is not None:
        parent, config = _parent(config, _overrides())
        record = parent.record()
        label += f" init={record['label']}@{record['train_len']}"
    run = Run(
        runs.folder_of(results, config.task_name, config.scheme_name, config.seed, config.digest())
    )
    with run.lock() as mine:
        if not mine:
            say(f"{run.folder}: another process is training this run; left alone")
            return None
        record = run.record() if (run.folder / "run.json").exists() else None
        if record is not None and record["status"] == "finished":
            say(f"already trained: {run.folder}")
        else:
            try:
                record = train_run(config, run, parent, label)
            except Interrupted as error:
                raise RunFailed(
                    f"stopped by {error}; the same command goes on", SIGNALLED + error.number
                ) from None
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
        f"{record['wall_s']:.0f} s, accuracy {check['token_acc']:.4f} (last tenth "
        f"{check['tail_acc']:.4f}) at {record['train_len']} tokens, converged: "
        f"{'yes' if record['converged'] else 'no'}"
    )


def _label(scheme: str, overrides: list[str]) -> str:
    """The scheme's name and every override that makes this run another one than the default."""
    kept = [word for word in overrides if word.partition("=")[0].lstrip("+~") not in NOT_A_VARIANT]
    return " ".join([scheme, *sorted(kept)])


def _parent(config: Config, typed: list[str]) -> tuple[Run, Config]:
    """The finished run that `init` names, and the config with its hash in place of its path."""
    parent = Run(Path(str(config.init)).absolute())
    try:
        record = parent.record()
    except UserError as error:
        raise UserError(f"init={config.init}: {error}") from None
    if record["status"] != "finished":
        raise UserError(
            f"init={config.init}: that run is {record['status']}, not finished; train it first"
        )
    if record["scheme"] != config.scheme_name or record["task"] != config.task_name:
        raise UserError(
            f"init={config.init} is a run of scheme={record['scheme']} task={record['task']}: give "
            "the same here"
        )
    old = loads(parent.config_text(), str(parent.folder))
    if old.model != config.model or old.task != config.task:
        raise UserError(
            f"init={config.init} has another model or task: give the same model=, model.* and "
            "task.* keys as there"
        )
    given = {word.partition("=")[0].lstrip("+") for word in typed}
    for key, value in old.scheme.items():
        if config.scheme.get(key) != value and f"scheme.{key}" not in given:
            raise UserError(
                f"init={config.init} has scheme.{key}={value}, here it would be "
                f"{config.scheme.get(key)}: give scheme.{key}=... to say which you want"
            )
    if old.extension is not None:
        raise UserError(
            f"init={config.init} was itself trained under extension={old.extension['name']}: "
            "continue the run that it started from"
        )
    return parent, config.with_parent(record["hash"], record["train_len"])
