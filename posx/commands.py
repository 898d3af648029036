"""The verbs: each turns a command line into calls of the modules below."""

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posx import catalog, runs
from posx.errors import UserError
from posx.lengths import parse as parse_lengths
from posx.progress import say
from posx.runs import Run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from posx.config import Config

GROUPS = ("scheme", "extension", "task", "model", "optim")
FILTERS = ("scheme", "task", "seed", "data_seed", "train_len", "status", "converged", "hash")
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
    from posx import hydra_app

    failures: list[Exception] = []

    def job(node: "DictConfig") -> float:
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


def _train_one(node: "DictConfig") -> dict[str, Any]:
    """Train the run of one composed config, unless it is there already; returns its record."""
    from hydra.core.hydra_config import HydraConfig

    from posx.config import from_node
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
        runs.folder_of(results, config.task_name, config.scheme_name, config.seed, config.digest())
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
                raise RunFailed(
                    f"stopped by {error}; the same command goes on", 128 + error.number
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
        f"{record['wall_s']:.0f} s, accuracy {check['token_acc']:.4f} (last tenth {check['tail_acc']:.4f}) at "
        f"{record['train_len']} tokens, converged: {'yes' if record['converged'] else 'no'}"
    )


def _label(scheme: str, overrides: list[str]) -> str:
    """The scheme's name and every override that makes this run another one than the default."""
    kept = [word for word in overrides if word.partition("=")[0].lstrip("+~") not in NOT_A_VARIANT]
    return " ".join([scheme, *sorted(kept)])


def _parent(config: "Config") -> tuple[Run, "Config"]:
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


# -- eval ------------------------------------------------------------------------------------------


def evaluate(
    words: list[str],
    results: Path,
    lengths: str | None,
    extensions: list[str],
    trusted: tuple[str, ...],
    extra: Path | None,
    again: bool,
    **budget: Any,
) -> None:
    """Fill the missing cells of the runs that `words` name; of all finished runs when none is named.

    Raises:
        UserError: no run, or a length or extension that fits none of them; found before any work.
        RunFailed: a run's weights cannot be read; the others were evaluated.
    """
    from posx import build
    from posx.evaluate import fill, plan
    from posx.measure import Budget

    wanted = None if lengths is None else parse_lengths(lengths)
    changes = [
        build.make_extension(build.load_yaml(catalog.find("extension", name, extra)))
        for name in extensions
    ]
    chosen = [run for run in _choose(words, results) if run.record()["status"] == "finished"]
    if not chosen:
        raise UserError(
            f"no finished run {_with(words)}in {results}: see all with `posx list run`, train one with "
            "`posx train scheme=rope`"
        )
    plans, refused = [], []
    for run in chosen:
        try:
            plans.append(plan(run, wanted, changes, trusted))
        except UserError as error:
            refused.append(str(error))
    if not plans:
        raise UserError(refused[0])
    for text in dict.fromkeys(refused):
        say(f"skipped: {text}")
    broken = 0
    for each in plans:
        try:
            fill(each, Budget(**budget), again)
        except UserError as error:
            broken += 1
            say(f"posx: {error}")
    if broken:
        raise RunFailed(f"{broken} of {len(plans)} runs could not be evaluated")
    say(f"{len(plans)} runs evaluated; compare them with `posx report`")


# -- report, list, show ----------------------------------------------------------------------------


def report(words: list[str], results: Path, **options: Any) -> None:
    """Print or write the comparison tables of all runs, or of those that `words` name."""
    from posx.report import report as compare

    for written in compare(_choose(words, results), results, **options):
        say(f"wrote {written}")


def list_names(group: str, words: list[str], results: Path, extra: Path | None) -> None:
    """One line for each scheme, task, extension, model or run."""
    from posx.display import print_rows

    if group == "run":
        print_rows([_run_line(run) for run in _choose(words, results)])
        return
    if group not in GROUPS:
        raise UserError(
            f"cannot list {group!r}{catalog.nearest(group, [*GROUPS, 'run'])}: use "
            f"{', '.join([*GROUPS, 'run'])}"
        )
    files = catalog.files(group, extra)
    rows = [{"name": name, "card": catalog.card(path)} for name, path in files.items()]
    if group == "scheme":
        from posx.cards import scheme_facts

        rows = [
            {"name": row["name"], **scheme_facts(files[row["name"]]), "card": row["card"]}
            for row in rows
        ]
    print_rows(rows)


def show(word: str, extra: Path | None) -> None:
    """The card of `scheme=rope` (or a task or extension), or the config and tables of a run."""
    from posx import cards

    group, equals, name = word.partition("=")
    if equals:
        if group not in GROUPS:
            raise UserError(
                f"cannot show {group!r}{catalog.nearest(group, GROUPS)}: use {', '.join(GROUPS)} or a run "
                "folder"
            )
        cards.show_name(group, catalog.find(group, name, extra))
        return
    folder = Path(word)
    if not folder.exists():
        known = [f"{group}={name}" for group in GROUPS for name in catalog.files(group, extra)]
        raise UserError(
            f"{word} is no run folder{catalog.nearest(word, known)}: write a folder from `posx list run`, or "
            "scheme=rope"
        )
    cards.show_run(Run(folder.absolute()))


def _run_line(run: Run) -> dict[str, str]:
    record = run.record()
    check = record.get("check") or {}
    converged = {True: "yes", False: "no", None: ""}[record["converged"]]
    return {
        "task": record["task"],
        "scheme": record["label"],
        "train_len": str(record["train_len"]),
        "seed": str(record["seed"]),
        "status": record["status"] + (f": {record['reason']}" if record["reason"] else ""),
        "steps": str(record["steps"]),
        "converged": converged,
        "accuracy": f"{check['token_acc']:.4f}" if check else "",
        "run": str(_relative(run.folder)),
    }


def _relative(folder: Path) -> Path:
    """The folder as seen from here, where it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


# -- which runs ------------------------------------------------------------------------------------


def _choose(words: list[str], results: Path) -> list[Run]:
    """Runs by folder, or all in `results` that match every key=value; a value may be a comma list.

    Raises:
        UserError: there is none, or a key that runs do not have.
    """
    filters = dict(word.split("=", 1) for word in words if "=" in word)
    folders = [Path(word) for word in words if "=" not in word]
    if folders:
        found, problems = [Run(folder.absolute()) for folder in folders], []
    else:
        found, problems = runs.find(results)
    for problem in problems:
        say(f"posx: left out: {problem}")
    matching = [run for run in found if _matches(run.record(), filters)]
    if not matching:
        raise UserError(
            f"no runs {_with(words)}in {results}: train one with `posx train scheme=rope`, or name another "
            "folder with --results-dir"
        )
    return matching


def _matches(record: dict[str, Any], filters: dict[str, str]) -> bool:
    for key, value in filters.items():
        if key not in record:
            raise UserError(
                f"cannot choose runs by {key!r}{catalog.nearest(key, record)}: use {', '.join(FILTERS)}"
            )
        if str(record[key]).lower() not in value.lower().split(","):
            return False
    return True


def _with(words: list[str]) -> str:
    return f"with {' '.join(words)} " if words else ""
