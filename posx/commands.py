"""The verbs: each turns a command line into calls of the modules below."""

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posx import catalog, runs
from posx.errors import RunFailed, UserError
from posx.lengths import looks_like as looks_like_lengths
from posx.lengths import parse as parse_lengths
from posx.progress import say
from posx.runs import Run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from posx.config import Config

YES_NO = {"true": "yes", "false": "no", "none": "", "null": ""}  # as the lists print them
FILTERS = ("scheme", "task", "seed", "data_seed", "train_len", "status", "converged", "hash")
SIGNALLED = 128  # exit codes above it say which signal asked to stop
NOT_A_VARIANT = ("scheme", "task", "seed", "data_seed", "init", "results_dir", "device", "threads")


def train(words: list[str]) -> None:
    """One run, or with -m a sweep; `words` are Hydra's overrides and flags.

    Raises:
        UserError: the words or the config are wrong.
        RunFailed: a run broke or was stopped; the others of a sweep were still trained.
    """
    from posx import hydra_app

    here = os.getpid()
    done: list[str] = []
    failures: list[tuple[str, UserError | RunFailed]] = []

    def job(node: "DictConfig") -> float:
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
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word) for word in typed or ()]


def _train_one(node: "DictConfig") -> dict[str, Any] | None:
    """Train the run of one composed config, unless it is there already; returns its record, or None
    where another process is at it."""
    from hydra.core.hydra_config import HydraConfig

    from posx.config import from_node
    from posx.train import Interrupted
    from posx.train import train as train_run

    hydra = HydraConfig.get()
    config = from_node(node, dict(hydra.runtime.choices))
    label = _label(config.scheme_name, _overrides())
    results = Path(node.results_dir).absolute()
    parent = None
    if config.init is not None:
        parent, config = _parent(config)
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


def _parent(config: "Config") -> tuple[Run, "Config"]:
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
    """Fill the missing cells of the runs that `words` name; of all finished ones without words.

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
            f"no finished run {_with(words)}in {results}: see all with `posx list run`, train one "
            "with `posx train scheme=rope`"
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
    broken = []
    for each in plans:
        try:
            fill(each, Budget(**budget), again)
        except UserError as error:
            broken.append(str(error))
    if broken and len(plans) == 1:
        raise RunFailed(broken[0])
    for text in broken:
        say(f"posx: {text}")
    if broken:
        raise RunFailed(f"{len(broken)} of {len(plans)} runs could not be evaluated")
    evaluated = f"{len(plans)} run{'s' if len(plans) > 1 else ''} evaluated"
    say(f"{evaluated}; compare with `posx report`")


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
        rows = [_run_line(run) for run in _choose(words, results)]
        print_rows(rows, below=("run", "changes", "reason"))
        return
    groups = catalog.groups(*([extra] if extra else []))
    if group not in groups:
        raise UserError(
            f"cannot list {group!r}{catalog.nearest(group, [*groups, 'run'])}: use "
            f"{', '.join([*groups, 'run'])}"
        )
    if words:
        raise UserError(f"`posx list {group}` takes no {' '.join(words)}: only runs are chosen so")
    files = catalog.files(group, extra)
    facts: dict[str, dict[str, str]] = {name: {} for name in files}
    if group == "scheme":
        from posx.cards import scheme_facts

        facts = {name: scheme_facts(path) for name, path in files.items()}
    print_rows(
        [{"name": name, **facts[name], "card": catalog.card(files[name])} for name in files],
        below=("card",),
    )


def show(word: str, extra: Path | None) -> None:
    """The card of `scheme=rope` (or a task or extension), or the config and tables of a run."""
    from posx import cards

    groups = catalog.groups(*([extra] if extra else []))
    group, equals, name = word.partition("=")
    if equals and not Path(word).exists():
        if group not in groups:
            raise UserError(
                f"cannot show {group!r}{catalog.nearest(group, groups)}: use {', '.join(groups)} "
                "or a run folder"
            )
        cards.show_name(group, catalog.find(group, name, extra))
        return
    if not word or not Path(word).exists():
        raise UserError(_no_folder(word, extra))
    cards.show_run(Run(Path(word).absolute()))


def check(word: str | None, extra: Path | None) -> None:
    """The conformance checks of one scheme, or of all.

    Raises:
        UserError: there is no such scheme, or it cannot be made at all.
        RunFailed: a check fails.
    """
    from functools import partial

    from posx import build, conformance
    from posx.display import out, print_rows

    known = catalog.files("scheme", extra)
    group, equals, name = word.partition("=") if word else ("", "", "")
    if equals and group != "scheme":
        raise UserError(f"cannot check {group!r}: write scheme=NAME, or nothing for all schemes")
    if word:
        name = name if equals else group
        known = {name: catalog.find("scheme", name, extra)}
    failed = []
    for name, path in known.items():
        make = partial(build.make_scheme, build.load_yaml(path))
        subject = conformance.Subject(name, make, catalog.card(path))
        make(subject.site())
        results = conformance.run(subject)
        bad = [result for result in results if not result.passed]
        failed += [f"{name}: {result.check}" for result in bad]
        rows = [
            {
                "scheme": name,
                "check": result.check,
                "result": "pass" if result.passed else "FAIL",
                "what": " ".join(result.message.split()),
            }
            for result in (results if word else bad)
        ]
        if not word:
            out().print(f"{name}: {len(results) - len(bad)} of {len(results)} checks pass")
        if rows:
            print_rows(rows, below=("what",))
    if failed:
        raise RunFailed(f"{len(failed)} checks failed: {'; '.join(failed)}")


def _run_line(run: Run) -> dict[str, str]:
    record = run.record()
    found = record.get("check") or {}
    return {
        "task": record["task"],
        "scheme": record["scheme"],
        "train_len": str(record["train_len"]),
        "seed": str(record["seed"]),
        "status": record["status"],
        "steps": str(record["steps"]),
        "converged": _text(record["converged"]),
        "accuracy": f"{found['token_acc']:.4f}" if found else "",
        "run": str(_relative(run.folder)),
        "changes": record["label"].removeprefix(record["scheme"]).strip(),
        "reason": record["reason"] or "",
    }


def _relative(folder: Path) -> Path:
    """The folder as seen from here, where it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


# -- which runs ------------------------------------------------------------------------------------


def _choose(words: list[str], results: Path) -> list[Run]:
    """Runs by folder, or all in `results`, that match every key=value; a value may be a comma list.

    Raises:
        UserError: there is none, or a key or a value that no run has.
    """
    folders = [word for word in words if "=" not in word or Path(word).exists()]
    filters = dict(word.split("=", 1) for word in words if word not in folders)
    for word in folders:
        if not word or not Path(word).exists():
            raise UserError(_no_folder(word))
    if folders:
        found, problems = [Run(Path(folder).absolute()) for folder in folders], []
    else:
        found, problems = runs.find(results)
    for problem in problems:
        say(f"posx: left out: {problem}")
    if not found:
        raise UserError(
            f"no runs in {results}: train one with `posx train scheme=rope`, or name another "
            "folder with --results-dir"
        )
    records = [run.record() for run in found]
    wanted = {key: _values(key, value, records) for key, value in filters.items()}
    matching = [
        run
        for run, record in zip(found, records, strict=True)
        if all(_text(record[key]) in values for key, values in wanted.items())
    ]
    if not matching:
        raise UserError(f"no run with {' and '.join(words)}: see all with `posx list run`")
    return matching


def _values(key: str, text: str, records: list[dict[str, Any]]) -> set[str]:
    """The values of a filter. One that no run has is said; when none is left it is an error."""
    if key not in FILTERS:
        raise UserError(
            f"cannot choose runs by {key!r}{catalog.nearest(key, FILTERS)}: use "
            f"{', '.join(FILTERS)}"
        )
    there = {_text(record[key]) for record in records}
    wanted = [YES_NO.get(value.strip().lower(), value.strip().lower()) for value in text.split(",")]
    missing = [value for value in wanted if value not in there]
    if len(missing) == len(wanted):
        raise UserError(
            f"no run has {key}={text}{catalog.nearest(missing[0], there)}; there are: "
            f"{', '.join(sorted(there))}"
        )
    for value in missing:
        say(f"posx: no run has {key}={value}")
    return set(wanted)


def _text(value: Any) -> str:
    """A value of a record as it is listed and chosen by."""
    if value is None:
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value).lower()


def _no_folder(word: str, extra: Path | None = None) -> str:
    """One sentence on a word that names no run folder, with what was probably meant."""
    text = f"{word!r} is no run folder"
    groups = catalog.groups(*([extra] if extra else []))
    if word in (*groups, "run"):
        return f"{text}: names are in `posx list {word}`"
    names = {
        name: f"{group}={name}"
        for group in reversed(groups)
        for name in catalog.files(group, extra)
    }
    if word in names:
        return f"{text}: write {names[word]}"
    if looks_like_lengths(word):
        return f"{text}: lengths stand together, as in --lengths 512,2048"
    hint = catalog.nearest(word, names) or catalog.nearest(word, names.values())
    return f"{text}{hint}: write a folder from `posx list run`, or a name such as scheme=rope"


def _with(words: list[str]) -> str:
    return f"with {' '.join(words)} " if words else ""
