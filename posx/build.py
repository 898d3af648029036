"""From a config to objects: the only place that instantiates what a yaml names."""

import inspect
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from posx import catalog
from posx.config import Config
from posx.errors import UserError
from posx.model import Transformer
from posx.schemes.base import Scheme, Site
from posx.tasks.base import Task

Extension = Callable[[Scheme, int], Scheme]  # (trained scheme, evaluation length) -> changed copy


def make_task(config: Config) -> Task:
    """The task of a run."""
    return _instantiate(config.task)


def make_model(config: Config, task: Task) -> Transformer:
    """The model of a run, freshly initialised from torch's global generator."""
    site_len = config.init_len if config.extension and config.init_len else config.train_len
    make_scheme = partial(_instantiate, config.scheme)
    model = Transformer(config.model, task.vocab, make_scheme, site_len)
    if config.extension:
        extend(model, make_extension(config.extension), config.train_len)
    return model


def extend(model: Transformer, extension: Extension, length: int) -> None:
    """Put the model's schemes under a training-free extension for one evaluation length."""
    model.replace_schemes(lambda scheme: extension(scheme, length))


def make_extension(node: dict[str, Any]) -> Extension:
    """The extension that a yaml names, with its parameters bound.

    The first parameter's annotation says to which schemes it applies; others are refused.
    """
    function = _locate(node)
    bound = {key: value for key, value in node.items() if key not in ("name", "_target_")}
    kind = applies_to(function)

    def apply(scheme: Scheme, length: int) -> Scheme:
        if not isinstance(scheme, kind):
            raise UserError(
                f"extension {node['name']} changes {kind.__name__} schemes, not {type(scheme).__name__}; it "
                f"applies to: {', '.join(schemes_of(kind)) or 'no scheme in the catalogue'}"
            )
        try:
            return function(scheme, length, **bound)
        except TypeError as error:
            raise UserError(f"extension {node['name']}: {error}") from None

    return apply


def applies_to(function: Callable[..., Scheme]) -> type[Scheme]:
    """The scheme class that an extension changes: the annotation of its first parameter."""
    first = next(iter(inspect.signature(function).parameters))
    return typing.get_type_hints(function)[first]


def schemes_of(kind: type[Scheme]) -> list[str]:
    """Names in the catalogue whose class is `kind` or derived from it."""
    return [
        name
        for name, path in catalog.files("scheme").items()
        if issubclass(get_class(load_yaml(path)["_target_"]), kind)
    ]


def load_yaml(path: Path) -> dict[str, Any]:
    """One yaml of the catalogue, with its name."""
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{path} has no _target_: name the class or function it stands for")
    return {"name": path.stem, **{str(key): value for key, value in node.items()}}


def check_trust(config: Config, trusted: tuple[str, ...]) -> None:
    """Refuse a saved config that names code outside posx and the packages that the user trusts.

    A run folder may come from a stranger, and a `_target_` runs whatever it names.
    """
    allowed = ("posx", *trusted)
    for node in (config.scheme, config.task, config.extension):
        for target in _targets(node):
            if target.split(".")[0] not in allowed:
                raise UserError(
                    f"the run's config names {target}, which is not part of posx: if you trust that code, "
                    f"add --trust {target.split('.')[0]}"
                )


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "_target_":
                yield str(value)
            else:
                yield from _targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value)


def _locate(node: dict[str, Any]) -> Callable[..., Scheme]:
    from hydra.utils import get_method

    try:
        return get_method(node["_target_"])
    except Exception as error:  # whatever importing the user's module raises
        raise UserError(f"{node['name']}: cannot import {node['_target_']} ({error})") from None


def _instantiate(node: dict[str, Any], *arguments: Any) -> Any:
    """What `_target_` names, called with the arguments and the node's other keys."""
    call = {key: value for key, value in node.items() if key != "name"}
    try:
        return instantiate(call, *arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, TypeError):  # an unknown or missing constructor key
            raise UserError(f"{node['name']}: {cause}") from None
        raise UserError(f"{node['name']}: {str(error).splitlines()[0]}") from error
