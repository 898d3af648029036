"""The catalogue is the folder: every yaml of a config group is a name, its first line the card."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from posx.errors import UserError
from posx.paths import config_dir


def files(group: str, extra: Path | None = None) -> dict[str, Path]:
    """Name -> yaml file of a group, sorted; `extra` is a config folder of the user, which wins."""
    found: dict[str, Path] = {}
    for root in (config_dir(), extra):
        if root is not None:
            found |= {path.stem: path for path in (root / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def card(path: Path) -> str:
    """The one-line card: the comment on the first line of the yaml."""
    lines = path.read_text("utf-8").splitlines()
    return lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""


def find(group: str, name: str, extra: Path | None = None) -> Path:
    """The yaml file of a name.

    Raises:
        UserError: no such name; the nearest and all others are named.
    """
    known = files(group, extra)
    if name not in known:
        raise UserError(
            f"no {group} named {name!r}{nearest(name, known)}; there are: {', '.join(known)}"
        )
    return known[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'rope'?)`, or nothing when no name is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
