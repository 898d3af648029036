"""The verbs: each turns a command line into calls of the modules below."""

import re
from pathlib import Path
from typing import Any

from posx import catalog
from posx.choose import choose, no_folder, shown
from posx.errors import RunFailed, UserError
from posx.lengths import parse as parse_lengths
from posx.progress import say
from posx.runs import Record, Run


def train(words: list[str], jobs: int | None, dry: bool) -> None:
    """One run, or with -m a sweep on `jobs` processes; `words` are Hydra's overrides and flags.
    `dry` only says what there is to do."""
    if dry:
        from posx.study import dry_run

        dry_run(words, jobs)
    else:
        from posx.sweep import run_jobs

        run_jobs(words if jobs is None else [*words, f"hydra.launcher.jobs={jobs}"])


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
    found = choose(words, results)
    chosen = [run for run, record in found.items() if record["status"] == "finished"]
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
    broken, done = [], 0
    for each in plans:
        try:
            done += fill(each, Budget(**budget), again)
        except UserError as error:
            broken.append(str(error))
    if broken and len(plans) == 1:
        raise RunFailed(broken[0])
    for text in broken:
        say(f"posx: {text}")
    if broken:
        raise RunFailed(f"{len(broken)} of {len(plans)} runs could not be evaluated")
    say(f"{done} of {len(chosen)} runs are evaluated as asked; compare them with `posx report`")


def report(words: list[str], results: Path, **options: Any) -> None:
    """Print or write the comparison tables of all runs, or of those that `words` name."""
    from posx.report import report as compare

    for written in compare(choose(words, results), results, **options):
        say(f"wrote {written}")


def list_names(
    group: str,
    words: list[str],
    results: Path,
    extra: Path | None,
    cost: bool,
    sort: list[str],
    fmt: str,
) -> None:
    """One line for each scheme, task, extension, model or run; with `cost` what schemes cost."""
    from posx.display import LISTS, print_rows

    if fmt not in LISTS:
        raise UserError(f"--format {fmt} is not known: use {', '.join(LISTS)}")
    if cost and group != "scheme":
        raise UserError(f"--cost measures schemes: `posx list scheme --cost`, not {group}")
    if group == "run":
        rows = [_run_line(run, record) for run, record in choose(words, results).items()]
    else:
        rows = _names(group, words, extra, cost)
    for key in reversed(sort):  # a stable sort each, the most important last
        rows = _sorted(rows, key)
    print_rows(rows, below=("card", "run", "changes", "reason"), fmt=fmt)


def _sorted(rows: list[dict[str, str]], key: str) -> list[dict[str, str]]:
    """Rows by the column `key`, or downwards by `-key`; numbers by size, empty cells last.

    Raises:
        UserError: there is no such column.
    """
    column = key.removeprefix("-")
    if column not in rows[0]:
        raise UserError(
            f"cannot sort by {column!r}{catalog.nearest(column, rows[0])}: use {', '.join(rows[0])}"
        )

    def parts(row: dict[str, str]) -> list[str | float]:
        pieces = re.split(r"(\d+(?:\.\d+)?)", row[column])  # text and numbers in turns
        return [float(piece) if number % 2 else piece for number, piece in enumerate(pieces)]

    filled = sorted((row for row in rows if row[column]), key=parts, reverse=key != column)
    return filled + [row for row in rows if not row[column]]


def _names(group: str, words: list[str], extra: Path | None, cost: bool) -> list[dict[str, str]]:
    """A row for each yaml of a config group.

    Raises:
        UserError: there is no such group, or `words` do not choose from it.
    """
    groups = catalog.groups(*([extra] if extra else []))
    if group not in groups:
        raise UserError(
            f"cannot list {group!r}{catalog.nearest(group, [*groups, 'run'])}: use "
            f"{', '.join([*groups, 'run'])}"
        )
    if words and group != "scheme":
        raise UserError(
            f"`posx list {group}` takes no {' '.join(words)}: only schemes and runs are chosen so"
        )
    files = catalog.files(group, extra)
    facts: dict[str, dict[str, str]] = {name: {} for name in files}
    if group == "experiment":
        from posx import study

        facts = {name: {"runs": str(study.count(path))} for name, path in files.items()}
    if group == "scheme":
        from posx import cards

        facts = {name: cards.scheme_facts(path, extra) for name, path in files.items()}
        facts = {name: facts[name] for name in cards.choose_schemes(facts, words)}
        if cost:
            return cards.costs({name: files[name] for name in facts}, extra)
    return [{"name": name, **row, "card": catalog.card(files[name])} for name, row in facts.items()]


def show(word: str, extra: Path | None, plot: Path | None) -> None:
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
        cards.show_name(group, catalog.find(group, name, extra), extra, plot)
        return
    if not word or not Path(word).exists():
        raise UserError(no_folder(word, extra))
    if plot is not None:
        raise UserError("--plot draws a scheme here; `posx report --plot` draws the curves of runs")
    cards.show_run(Run(Path(word).absolute()))


def check(words: list[str], extra: Path | None) -> None:
    """The conformance checks of one scheme, or of all; under an extension where one is named.

    Raises:
        UserError: there is no such name, the two do not fit, or the scheme cannot be made at all.
        RunFailed: a check fails.
    """
    from posx import build, conformance
    from posx.display import out, print_rows

    chosen = _check_words(words)
    known = catalog.files("scheme", extra)
    if "scheme" in chosen:
        known = {chosen["scheme"]: catalog.find("scheme", chosen["scheme"], extra)}
    extension = None
    if "extension" in chosen:
        path = catalog.find("extension", chosen["extension"], extra)
        extension = build.make_extension(build.load_yaml(path))
        if "scheme" in chosen:
            extension.check(build.load_yaml(known[chosen["scheme"]], extra))
        known = {
            name: path
            for name, path in known.items()
            if extension.fits(build.load_yaml(path, extra))
        }
    failed = []
    for name, path in known.items():
        make = build.maker(build.load_yaml(path, extra), extension)
        label = name if extension is None else f"{name} + {extension.name}"
        subject = conformance.Subject(label, make, catalog.card(path))
        make(subject.site())
        results = conformance.run(subject)
        bad = [result for result in results if not result.passed]
        failed += [f"{label}: {result.check}" for result in bad]
        rows = [
            {
                "scheme": label,
                "check": result.check,
                "result": "pass" if result.passed else "FAIL",
                "what": " ".join(result.message.split()),
            }
            for result in (results if len(known) == 1 else bad)
        ]
        if len(known) > 1:
            out().print(f"{label}: {len(results) - len(bad)} of {len(results)} checks pass")
        if rows:
            print_rows(rows, below=("what",))
    if failed:
        raise RunFailed(f"{len(failed)} checks failed: {'; '.join(failed)}")


def _check_words(words: list[str]) -> dict[str, str]:
    """`scheme=NAME` (or the bare name) and `extension=NAME`, each at most once."""
    chosen: dict[str, str] = {}
    for word in words:
        group, equals, name = word.partition("=")
        group, name = (group, name) if equals else ("scheme", group)
        if group not in ("scheme", "extension") or group in chosen:
            raise UserError(
                f"cannot check {word!r}: write scheme=NAME, extension=NAME, both, or nothing for "
                "all schemes"
            )
        chosen[group] = name
    return chosen


def _run_line(run: Run, record: Record) -> dict[str, str]:
    found = record.get("check") or {}
    return {
        "task": record["task"],
        "scheme": record["scheme"],
        "train_len": str(record["train_len"]),
        "seed": str(record["seed"]),
        "status": record["status"],
        "steps": str(record["steps"]),
        "converged": shown(record["converged"]),
        "accuracy": f"{found['token_acc']:.4f}" if found else "",
        "run": str(_relative(run.folder)),
        "changes": record["label"].removeprefix(record["scheme"]).strip(),
        "reason": record["reason"] or "",
    }


def _relative(folder: Path) -> Path:
    """The folder as seen from here, where it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _with(words: list[str]) -> str:
    return f"with {' '.join(words)} " if words else ""
