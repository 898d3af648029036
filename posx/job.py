"""One job: a run to train, and to evaluate where that was asked for, in whatever process."""

import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from posx import build, catalog, lengths, runs
from posx.build import Extension, typed
from posx.config import Config, from_node, loads
from posx.errors import RunFailed, UserError
from posx.evaluate import Plan, fill, missing_cells, plan_of
from posx.measure import Budget
from posx.progress import say
from posx.runs import Run
from posx.train import Interrupted
from posx.train import train as train_run

SIGNALLED = 128  # exit codes above it say which signal asked to stop
NOT_A_VARIANT = (  # keys that do not make another run than the default
    *("scheme", "task", "seed", "data_seed", "init", "results_dir", "device", "threads"),
    *("eval", "experiment"),
)
AT_DEFAULT = "default"  # eval.lengths that stands for those of `posx eval`


@dataclass(frozen=True)
class Job:
    """What one job does; goes to other processes."""

    config: Config
    run: Run
    parent: Run | None
    label: str
    plan: Plan | None  # the cells to evaluate
    left_out: tuple[str, ...]  # extensions that were asked for and do not change the scheme


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    state: str  # finished | there (it was before) | refused | failed | lost | stopped
    text: str  # one sentence
    value: float = float("nan")  # loss of the last steps, in range and on fresh data: for sweepers
    code: int = 0  # that posx ends with


# -- before ----------------------------------------------------------------------------------------


def prepare(node: DictConfig) -> Job:
    """The job of a composed config, while Hydra runs it.

    Raises:
        UserError: the config is wrong, or what it names is not there.
    """
    hydra = HydraConfig.get()
    keys = {word.partition("=")[0].lstrip("+") for word in overrides()}
    if missing := set(hydra.sweeper.get("params") or ()) - keys:
        raise UserError(f"{', '.join(sorted(missing))} are to be swept: add -m")
    sources = [Path(each.path) for each in hydra.runtime.config_sources if each.schema == "file"]
    config = typed(from_node(node, dict(hydra.runtime.choices)), *sources)
    label = _label(config.scheme_name, overrides())
    results = Path(node.results_dir).absolute()
    parent = None
    if config.init_len is not None:
        raise UserError("init_len follows from init=RUN: leave it out")
    if config.init is not None:
        parent, config = _parent(config, overrides())
        record = parent.record()
        label += f" init={record['label']}@{record['train_len']}"
    run = Run(
        runs.folder_of(results, config.task_name, config.scheme_name, config.seed, config.digest())
    )
    evaluation = OmegaConf.to_container(node, resolve=True).get("eval")  # ty: ignore
    return Job(config, run, parent, label, *_plan(run, config, evaluation, sources))


def overrides() -> list[str]:
    """The overrides of the job that Hydra is running, as they were typed."""
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word) for word in typed or ()]


def _label(scheme: str, overrides: list[str]) -> str:
    """The scheme's name and every override that makes this run another one than the default."""
    keys = {word: word.partition("=")[0].lstrip("+~") for word in overrides}
    kept = [
        word
        for word, key in keys.items()
        if key not in NOT_A_VARIANT and not key.startswith("eval.")
    ]
    return " ".join([scheme, *sorted(kept)])


def _plan(
    run: Run, config: Config, values: Any, sources: list[Path]
) -> tuple[Plan | None, tuple[str, ...]]:
    """The cells that the keys of `eval` ask for, and the extensions among them that do not fit.

    Raises:
        UserError: an unknown key, a length that the task cannot make, or an unknown extension.
    """
    known = ("lengths", "extensions")
    if not isinstance(values, dict):
        raise UserError(f"eval={values}: eval is a group of keys, not a value")
    for key in values:
        if key not in known:
            raise UserError(
                f"no key 'eval.{key}'{catalog.nearest(str(key), known)}; there are: "
                f"{', '.join(known)}"
            )
    wanted, names = values.get("lengths"), values.get("extensions")
    if wanted is None and names is None:
        return None, ()
    parsed = None
    if wanted not in (None, AT_DEFAULT):
        parsed = lengths.parse(",".join(map(str, _listed(wanted))), "eval.lengths")
    changes: list[Extension | None] = [None]
    for name in _listed(names or []):
        node = build.load_yaml(catalog.find("extension", str(name), *sources), *sources)
        changes.append(build.make_extension(node))
    fitting = [each for each in changes if each is None or each.fits(config.scheme)]
    left_out = tuple(each.name for each in changes if each is not None and each not in fitting)
    return plan_of(run, config, parsed, fitting), left_out


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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


# -- the work --------------------------------------------------------------------------------------


def standing(job: Job) -> str:
    """How far a job is: `new`, `broken` (begun, and not finished), `trained` (some cells are to be
    evaluated) or `done`."""
    if not (job.run.folder / "run.json").exists():
        return "new"
    if job.run.record()["status"] != "finished":
        return "broken"
    if job.plan is not None and missing_cells(job.plan, Budget(), job.run.table("eval")):
        return "trained"
    return "done"


def there(job: Job) -> Outcome | None:
    """The outcome of a job that has nothing left to do."""
    with suppress(UserError):  # what cannot be read is said by who works on it
        if standing(job) == "done":
            return _good("there", job.run)
    return None


def carry_out(job: Job) -> Outcome | None:
    """Do the work; what goes wrong is an outcome, too. None where another process is at it."""
    try:
        return work(job)
    except (UserError, RunFailed) as error:
        return outcome_of(error)


def work(job: Job) -> Outcome | None:
    """Train and evaluate, as far as that is not done; None where another process is at it.

    Raises:
        UserError: the config fits neither task, scheme nor machine, or a file cannot be written.
        RunFailed: the run broke, which is recorded in its folder, or was stopped.
    """
    with job.run.lock() as mine:
        if not mine:
            return None
        record = job.run.record() if (job.run.folder / "run.json").exists() else None
        done = record is not None and record["status"] == "finished"
        if record is None or not done:
            _train(job)
    for name in job.left_out:
        say(f"extension {name} does not change {job.config.scheme_name}: not evaluated")
    if job.plan is not None:
        try:
            if not fill(job.plan, Budget(), again=False):
                return None
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(_keep(job.run, error)) from error
    return _good("there" if done else "finished", job.run)


def _train(job: Job) -> None:
    """Train the run, which is locked; a failure is recorded."""
    try:
        train_run(job.config, job.run, job.parent, job.label)
    except Interrupted as error:
        raise RunFailed(
            f"stopped by {error}; the same command goes on", SIGNALLED + error.number
        ) from None
    except UserError as error:
        with suppress(UserError):  # the disk may be what is full
            mark(job.run, "failed", str(error))
        raise
    except Exception as error:
        text = _keep(job.run, error)
        mark(job.run, "failed", _reason(error))
        raise RunFailed(text) from error


def mark(run: Run, status: str, reason: str) -> None:
    """Record why a run that says that it is running is not; it must be locked."""
    if not (run.folder / "run.json").exists():
        return
    record = run.record()
    if record["status"] == "running":
        run.write_record(record | {"status": status, "reason": reason})


def _keep(run: Run, error: Exception) -> str:
    """Keep the traceback in the run folder; returns one sentence."""
    runs.write_text(run.folder / "error.txt", "".join(traceback.format_exception(error)))
    return f"{run.folder}: failed with {_reason(error)}; the traceback is in error.txt there"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _good(state: str, run: Run) -> Outcome:
    value = float("nan")
    with suppress(UserError, IndexError):  # a finished run is one without its table, too
        value = float(run.table("train")["loss"].iloc[-1])
    return Outcome(state, describe(run.record()), value)


def outcome_of(error: UserError | RunFailed) -> Outcome:
    """What an error makes of a job."""
    state = "refused" if isinstance(error, UserError) else "failed"
    if error.code > SIGNALLED:
        state = "stopped"
    return Outcome(state, str(error), code=error.code)


def describe(record: dict[str, Any]) -> str:
    """One sentence on a finished run."""
    check = record["check"]
    return (
        f"{record['task']}/{record['scheme']} seed {record['seed']}: {record['steps']} steps, "
        f"{record['wall_s']:.0f} s, accuracy {check['token_acc']:.4f} (last tenth "
        f"{check['tail_acc']:.4f}) at {record['train_len']} tokens, converged: "
        f"{'yes' if record['converged'] else 'no'}"
    )
