"""The catalogue is the folder: every yaml of a config group is a name, its first line the card."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from posx.errors import UserError
from posx.paths import config_dir

FIRST = ("scheme", "extension", "task", "model", "optim", "experiment")


def groups(*extra: Path) -> list[str]:
    """The config groups: every folder with a yaml, but for Hydra's own."""
    found = {
        path.parent.name
        for root in (config_dir(), *extra)
        for path in root.glob("*/*.yaml")
        if path.parent.name != "hydra"
    }
    return sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else 99, name))


def files(group: str, *extra: Path | None) -> dict[str, Path]:
    """Name -> yaml file of a group, sorted; `extra` are config folders of the user, which win."""
    found: dict[str, Path] = {}
    for root in (config_dir(), *extra):
        if root is not None:
            found |= {path.stem: path for path in (root / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def card(path: Path) -> str:
    """The one-line card: the comment on the first line of the yaml, below Hydra's `# @package`."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("# @")]
    return lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""


def source(card: str) -> tuple[str, str]:
    """Year and link of a card that ends in `(Press et al. 2021, arXiv:2108.12409)`; empty where it
    names none."""
    found = re.search(r"(\d{4})\D*?(?:arXiv:(\d{4}\.\d{4,5})|(https?://[^\s)]+))\)$", card)
    if found is None:
        return "", ""
    year, number, address = found.groups()
    return year, address or f"https://arxiv.org/abs/{number}"


def find(group: str, name: str, *extra: Path | None) -> Path:
    """The yaml file of a name.

    Raises:
        UserError: no such name; the nearest and all others are named.
    """
    known = files(group, *extra)
    if name not in known:
        raise UserError(unknown(group, name, known))
    return known[name]


def unknown(group: str, name: str, known: Iterable[str]) -> str:
    """One sentence on a name that is not there."""
    known = list(known)
    return f"no {group} named {name!r}{nearest(name, known)}; there are: {', '.join(known)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'rope'?)`, or nothing when no name is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
