"""Running a function under Hydra from another command line, and its errors as sentences.

`compose()` can neither sweep nor launch, so training goes through `hydra.main` with an argument
list of our own; launchers and sweepers then work unchanged.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
    SearchPathException,
)
from omegaconf import DictConfig, OmegaConf

from posx import catalog
from posx.errors import RunFailed, UserError
from posx.paths import RESULTS_VARIABLE, config_dir

FULL_ERROR = "HYDRA_FULL_ERROR"
# Hydra's flags, and those of them that the next word belongs to.
TAKE_A_WORD = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--info", "-i", "--experimental-rerun"),
)
FLAGS = ("--multirun", "-m", "--resolve", "--run", "-r", "--version", *TAKE_A_WORD)
CLOSE = 0.55  # difflib's ratio at which two names are taken for one and a slip of the finger
ALL_KEYS = "`posx train --cfg job` prints all keys"


class Task(Protocol):
    """What Hydra calls with each composed config."""

    begun: bool  # whether it was called: what goes wrong from then on is not about the words

    def __call__(self, node: DictConfig) -> Any: ...


def run(task: Task, name: str, words: list[str]) -> None:
    """Call `task` with the config `name` composed from the overrides and flags in `words`.

    Raises:
        UserError: Hydra refused the words.
        UserError, RunFailed: what a job raised in the process of a launcher.
        SystemExit: a flag such as --cfg had Hydra print and stop.
    """
    main = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=name)(task)
    try:
        with ExitStack() as stack:
            stack.enter_context(_argv(["posx train", *_of_swept(_flags_first(words))]))
            stack.enter_context(_environ(FULL_ERROR, "1"))  # raise, print nothing
            stack.enter_context(_refusing(words))
            main()
    except (UserError, RunFailed):
        raise
    except Exception as error:
        if cause := _user_error(error):
            raise cause from None
        if task.begun or _of_stdout(error):
            raise
        raise UserError(_sentence(error, words)) from error


def _of_stdout(error: Exception) -> bool:
    """Whether the reader of --cfg left, or its disk is full: such errors name no file."""
    is_hydra = isinstance(error, HydraException)
    return isinstance(error, OSError) and not is_hydra and error.filename is None


def _user_error(error: BaseException | None) -> UserError | None:
    """The UserError inside an exception, if there is one."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


# -- the words -------------------------------------------------------------------------------------


def _flags_first(words: list[str]) -> list[str]:
    """Hydra's parser refuses overrides on both sides of a flag, as in `seed=0 -m task=copy`."""
    if words and words[-1] in TAKE_A_WORD:  # it would take the first override
        return words
    flags, overrides = [], []
    for before, word in zip(["", *words], words, strict=False):
        (flags if word.startswith("-") or before in TAKE_A_WORD else overrides).append(word)
    return [*flags, *overrides]


def _of_swept(words: list[str]) -> list[str]:
    """Before it sweeps, Hydra composes the config without the swept words, so that it would look
    for `scheme.bias_init=0` in the default scheme. Where `scheme` is swept, such a word becomes a
    sweep of one value."""
    if not {"-m", "--multirun"} & set(words):
        return words
    parser, overrides = OverridesParser.create(), {}
    for word in words:
        with suppress(HydraException):  # flags; what is wrong is said when Hydra meets it
            overrides[word] = parser.parse_override(word)
    swept = {each.key_or_group for each in overrides.values() if each.is_sweep_override()}
    changed = []
    for word in words:
        each = overrides.get(word)
        if each and each.key_or_group.partition(".")[0] in swept and not each.is_sweep_override():
            key, _, value = word.partition("=")
            word = f"{key}=choice({value})" if value else word
        changed.append(word)
    return changed


@contextmanager
def _refusing(words: list[str]) -> Generator[None]:
    """Flags that Hydra's parser does not know become a UserError instead of a page of usage."""

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise UserError(_flag_sentence(message, words))

    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = refuse  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before


def _flag_sentence(message: str, words: list[str]) -> str:
    found = re.match(r"unrecognized arguments: .*?(-\S+)", message)
    if not found:
        return message.removeprefix("argument ")
    flag, _, value = found[1].partition("=")
    key = flag.lstrip("-").replace("-", "_")
    after = words[words.index(flag) + 1 :] if flag in words else []
    if after and not value and not re.match(r"-|.*=", after[0]):
        value = after[0]
    keys = _keys(words)
    near = catalog.nearest(flag, [name for name in FLAGS if name.startswith("--")])
    if near and key not in (name.rpartition(".")[2] for name in keys):
        return f"no flag {flag}{near}"
    if full := _nearest_key(key, keys):
        return f"no flag {flag}: config keys have no dashes, write {full}={value or '...'}"
    return f"no flag {flag}: config keys are written key=value; {ALL_KEYS}"


def _sentence(error: Exception, words: list[str]) -> str:
    """Hydra's error in one line, with the nearest valid name where something was not found."""
    text = " ".join(str(error).split()).partition(" full_key:")[0]
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, SearchPathException) and (found := re.search("'(.+)' not found", text)):
        return f"--config-dir {found[1]}: there is no such folder"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group and error.options:
            return catalog.unknown(group, name, error.options)
        return text.partition(" Config search path")[0]
    if isinstance(error, OSError):
        return (
            f"cannot write to {error.filename} ({error.strerror}): choose another folder with "
            f"results_dir=... or {RESULTS_VARIABLE}"
        )
    if found := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\. To use", text):
        full, value = found.groups()
        if full.startswith("eval."):
            return f"{full}={value}: write the list as {full}=[{value}]"
        if full in (*_keys(words), *_groups(words)):
            return f"{full}={value}: several values are a sweep; add -m"
        return _no_key(full, words)
    if found := re.search(r"Could not (?:override|delete) '(?:\w+@)?([^']+)'", text):
        return _no_key(found[1], words)
    if "Config group override must be" in text:
        return _no_name(words) or f"cannot read these overrides ({text})"
    if error.__cause__ is not None:
        return f"{text}: {' '.join(str(error.__cause__).split())}"
    return text


def _unreadable(word: str) -> str:
    """An override that does not parse; a bare name is told its group."""
    for group in catalog.groups():
        if word in catalog.files(group):
            return f"cannot read {word!r}: write {group}={word}"
    return f"cannot read {word!r}: write key=value, and a list as key=[1,2]"


def _no_key(full: str, words: list[str]) -> str:
    groups = _groups(words)
    if full in groups:
        return f"{full} is not chosen by default: write +{full}=..."
    near = _nearest_key(full, [*_keys(words), *groups])
    hint = f" (did you mean {near!r}?)" if near else ""
    if full == "lengths":
        hint += "; lengths to evaluate go to `posx eval --lengths`"
    return f"no key {full!r}{hint}; {ALL_KEYS}"


def _no_name(words: list[str]) -> str:
    """One sentence on a word such as `scheme=null`, which chooses no file of its group."""
    for word in words:
        group, _, name = word.partition("=")
        if group in _groups(words) and name not in (known := catalog.files(group, *_extra(words))):
            return catalog.unknown(group, name, known)
    return ""


def _nearest_key(key: str, known: list[str]) -> str | None:
    """The key that was probably meant: one of the same last part, or a close one of the same
    section, or where there is no such section the closest of all."""
    section, _, leaf = key.rpartition(".")
    leaves = [name.rpartition(".")[2] for name in known]
    if leaf in leaves and known[leaves.index(leaf)] != key:
        return known[leaves.index(leaf)]
    beside = [name for name in known if section and name.rpartition(".")[0] == section]
    pairs = [(name, leaf, name.rpartition(".")[2]) for name in beside or known]
    if not beside:
        pairs += [(name, key, name) for name in known]
    ratios = [difflib.SequenceMatcher(None, one, other).ratio() for _, one, other in pairs]
    best = max(range(len(pairs)), key=ratios.__getitem__)
    return pairs[best][0] if ratios[best] >= CLOSE else None


def _extra(words: list[str]) -> list[Path]:
    """The config folders that the words add: --config-dir DIR, hydra.searchpath=[file://DIR]."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        if before in ("--config-dir", "-cd"):
            found.append(Path(word))
        elif word.startswith("--config-dir="):
            found.append(Path(word.partition("=")[2]))
        elif word.startswith("hydra.searchpath="):
            found += [Path(name) for name in re.findall(r"file://([^,\]'\"]+)", word)]
    return found


def config_words(words: list[str]) -> list[str]:
    """Those of the words that add config folders."""
    flags = ("--config-dir", "-cd")
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word in flags
        or before in flags
        or word.startswith(("--config-dir=", "hydra.searchpath="))
    ]


def _groups(words: list[str]) -> list[str]:
    return catalog.groups(*_extra(words))


def _keys(words: list[str]) -> list[str]:
    """All keys of the config that the group choices in `words` give, dotted."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    extra = _extra(words)
    choices = [
        word
        for word in words
        if (found := re.fullmatch(r"\+?(\w+)=([\w-]+)", word))
        and found[1] in _groups(words)
        and found[2] in catalog.files(found[1], *extra)
    ]
    if extra:
        choices.append(
            f"hydra.searchpath=[{','.join(f'file://{path.absolute()}' for path in extra)}]"
        )
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", choices))
    return list(_dotted(config))


def _dotted(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


@contextmanager
def _argv(words: list[str]) -> Generator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _environ(key: str, value: str) -> Generator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
