"""Running a function under Hydra from another command line, and its errors as sentences.

`compose()` can neither sweep nor launch, so training goes through `hydra.main` with an argument list
of our own; launchers and sweepers then work unchanged.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posx import catalog
from posx.errors import UserError
from posx.paths import config_dir

FULL_ERROR = "HYDRA_FULL_ERROR"


def run(job: Callable[[DictConfig], Any], name: str, words: list[str]) -> None:
    """Call `job` with the config `name` composed from the overrides and flags in `words`.

    Raises:
        UserError: Hydra refused the words.
        SystemExit: Hydra's own parser did, or a flag such as --cfg had it print and stop.
    """
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    main = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=name)(job)
    try:
        with _argv(["posx train", *words]), _environ(FULL_ERROR, "1"):
            main()
    except (HydraException, OmegaConfBaseException) as error:
        cause = _user_error(error)
        if cause is not None:
            raise cause from None
        if wants_traceback:
            raise
        raise UserError(_sentence(error, words)) from None


def _user_error(error: BaseException | None) -> UserError | None:
    """The UserError inside an exception, if there is one."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _sentence(error: Exception, words: list[str]) -> str:
    """Hydra's error in one line, with the nearest valid name where something was not found."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and (
        found := re.search(r"Could not find '(\w+)/([^']+)'", text)
    ):
        group, name = found.groups()
        known = catalog.files(group)
        if not known:
            return text
        return f"no {group} named {name!r}{catalog.nearest(name, known)}; there are: {', '.join(known)}"
    if found := re.search(r"Key '(\w+)' is not in struct full_key: ([\w.]+)", text):
        full = found.group(2)
        return f"no key {full!r}{catalog.nearest(full, _keys(words))}; `posx train --cfg job` prints all keys"
    if found := re.search(r"Could not override '([^']+)'", text):
        full = found.group(1)
        groups = [f for f in ("scheme", "task", "model", "optim", "extension", "experiment")]
        return (
            f"no key {full!r}{catalog.nearest(full, [*_keys(words), *groups])}; `posx train --cfg job` prints "
            "all keys"
        )
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: write key=value, lists as key=[1,2]"
    if isinstance(error, ConfigCompositionException) and error.__cause__ is not None:
        return f"{text}: {' '.join(str(error.__cause__).split())}"
    return text


def _keys(words: list[str]) -> list[str]:
    """All keys of the config that the group choices in `words` give, dotted."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    choices = [
        word
        for word in words
        if re.fullmatch(r"(scheme|task|model|optim)=\w+", word)
        and word.partition("=")[2] in catalog.files(word.partition("=")[0])
    ]
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
def _argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _environ(key: str, value: str) -> Iterator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
