"""Which runs a command line names: folders, or filters such as `scheme=rope,alibi`."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from posx import catalog, runs
from posx.errors import UserError
from posx.lengths import looks_like as looks_like_lengths
from posx.progress import say
from posx.runs import Record, Run

YES_NO = {"true": "yes", "false": "no", "none": "", "null": ""}  # as the lists print them
FILTERS = ("scheme", "task", "seed", "data_seed", "train_len", "status", "converged", "hash")


def choose(words: list[str], results: Path) -> dict[Run, Record]:
    """Runs by folder, or all in `results`, that match every key=value, with their records; a value
    may be a comma list.

    Raises:
        UserError: there is none, or a key or a value that no run has.
    """
    folders = [word for word in words if "=" not in word or Path(word).exists()]
    filters = dict(word.split("=", 1) for word in words if word not in folders)
    for word in folders:
        if not word or not Path(word).exists():
            raise UserError(no_folder(word))
    if folders:
        named = [Run(Path(folder).absolute()) for folder in folders]
        found, problems = {run: run.record() for run in named}, []
    else:
        found, problems = runs.find(results)
    for problem in problems:
        say(f"posx: left out: {problem}")
    if not found:
        raise UserError(
            f"no runs in {results}: train one with `posx train scheme=rope`, or name another "
            "folder with --results-dir"
        )
    wanted = {key: _values(key, value, found.values()) for key, value in filters.items()}
    matching = {
        run: record
        for run, record in found.items()
        if all(shown(record[key]) in values for key, values in wanted.items())
    }
    if not matching:
        raise UserError(f"no run with {' and '.join(words)}: see all with `posx list run`")
    return matching


def _values(key: str, text: str, records: Collection[Record]) -> set[str]:
    """The values of a filter. One that no run has is said; when none is left it is an error."""
    if key not in FILTERS:
        raise UserError(
            f"cannot choose runs by {key!r}{catalog.nearest(key, FILTERS)}: use "
            f"{', '.join(FILTERS)}"
        )
    there = {shown(record[key]) for record in records}
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


def shown(value: Any) -> str:
    """A value of a record as it is listed and chosen by."""
    if value is None:
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value).lower()


def no_folder(word: str, extra: Path | None = None) -> str:
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
