"""From a config to objects: the only place that instantiates what a yaml names."""

import copy
import inspect
import logging
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from posx import catalog
from posx.config import Config
from posx.errors import UserError
from posx.model import Transformer
from posx.runs import AGAIN, Run
from posx.schemes.base import Maker, Scheme, Site
from posx.tasks.base import Task

# The types that a key of a yaml may have, in the user's words.
PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a name",
    type(None): "null",
}


@dataclass(frozen=True)
class Extension:
    """A training-free change of a trained scheme at one evaluation length, with its parameters
    bound.

    The annotation of the function's first parameter says which schemes it changes, be it the whole
    scheme or one that another is built around.
    """

    name: str
    function: Callable[..., Scheme]
    parameters: dict[str, Any]

    def __call__(self, scheme: Scheme, length: int) -> Scheme:
        """A changed copy of the scheme; a plain copy where there is nothing to change."""
        if isinstance(scheme, self.kind):
            try:
                return self.function(scheme, length, **self.parameters)
            except TypeError as error:
                raise UserError(f"extension {self.name}: {error}") from None
        changed = copy.deepcopy(scheme)
        for name, part in scheme.named_children():
            if isinstance(part, Scheme):
                setattr(changed, name, self(part, length))
        return changed

    @property
    def kinds(self) -> str:
        """The names of the classes that it changes."""
        return " or ".join(kind.__name__ for kind in typing.get_args(self.kind) or [self.kind])

    @property
    def kind(self) -> type[Scheme]:
        """The scheme class that it changes."""
        first = next(iter(inspect.signature(self.function).parameters))
        return typing.get_type_hints(self.function)[first]

    def fits(self, node: dict[str, Any]) -> bool:
        """Whether it changes the scheme that a resolved yaml names, or one inside it."""
        inner = (value for value in node.values() if isinstance(value, dict))
        found = issubclass(locate(node), self.kind)
        return found or any(self.fits(part) for part in inner if "_target_" in part)

    def check(self, node: dict[str, Any]) -> None:
        """Refuse a scheme that it does not change; those that it does are named."""
        if not self.fits(node):
            files = catalog.files("scheme").items()
            names = [name for name, path in files if self.fits(load_yaml(path))]
            raise UserError(
                f"extension {self.name} changes {self.kinds}, not {node['name']}: it "
                f"applies to {', '.join(names) or 'no scheme in the catalogue'}"
            )


def make_extension(node: dict[str, Any]) -> Extension:
    """The extension that a yaml names."""
    parameters = {key: value for key, value in node.items() if key not in ("name", "_target_")}
    return Extension(node["name"], locate(node), parameters)


def typed(config: Config, *extra: Path) -> Config:
    """The config with every scheme inside a scheme written out, and whole numbers as floats where a
    constructor takes floats, so that `scheme.base=10000` and `scheme.base=10000.0` are one run.

    extra: config folders of the user.
    """
    return replace(
        config,
        scheme=_floats(_resolved(config.scheme, extra)),
        task=_floats(config.task),
        extension=None if config.extension is None else _floats(config.extension),
    )


def _floats(node: dict[str, Any]) -> dict[str, Any]:
    hints = _hints(locate(node))
    return {
        key: _floats(value)
        if hints.get(key) == Maker
        else float(value)
        if isinstance(value, int) and not isinstance(value, bool) and _kinds(hints, key) == {float}
        else value
        for key, value in node.items()
    }


def _resolved(node: dict[str, Any], extra: tuple[Path | None, ...]) -> dict[str, Any]:
    """The keys of a scheme, where it takes another scheme with that one's keys instead of its name.

    Raises:
        UserError: there is no such scheme.
    """
    hints = _hints(locate(node))
    return {
        key: _part(f"{node['name']}.{key}", value, extra) if hints.get(key) == Maker else value
        for key, value in node.items()
    }


def _part(key: str, value: Any, extra: tuple[Path | None, ...]) -> dict[str, Any]:
    """All keys of a scheme given as its name, or as {name: ..., and some keys of its own}."""
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise UserError(f"{key}={value}: must be the name of a scheme, or {{name: ..., key: ...}}")
    if "_target_" not in given:
        given = load_yaml(catalog.find("scheme", given["name"], *extra), *extra) | given
    return _resolved(given, extra)


def make_task(config: Config) -> Task:
    """The task of a run."""
    task = _instantiate(config.task)
    if not isinstance(task, Task):
        raise UserError(f"{config.task_name}: {config.task['_target_']} is no posx.tasks.base.Task")
    return task


def make_scheme(node: dict[str, Any], site: Site) -> Scheme:
    """The scheme object of one site."""
    hints = _hints(locate(node))
    parts = {key for key in node if hints.get(key) == Maker}
    makers = {key: partial(make_scheme, node[key]) for key in parts}
    scheme = _instantiate({key: node[key] for key in node if key not in parts}, site, **makers)
    if not isinstance(scheme, Scheme):
        raise UserError(f"{node['name']}: {node['_target_']} is no posx.schemes.base.Scheme")
    return scheme


def maker(node: dict[str, Any], extension: Extension | None = None) -> Maker:
    """What builds the scheme of a site, for an extension at four times the training length."""

    def make(site: Site) -> Scheme:
        scheme = make_scheme(node, site)
        return scheme if extension is None else extension(scheme, 4 * site.train_len)

    return make


def make_model(config: Config, task: Task, parent: Run | None = None) -> Transformer:
    """The model of a run: fresh from torch's global generator, or with the weights of its parent.

    Raises:
        UserError: the scheme's table is shorter than the training sequences, or the parent's
            weights do not fit.
    """
    train_len = config.init_len if config.extension and config.init_len else config.train_len
    scheme = partial(make_scheme, config.scheme)
    model = Transformer(config.model, task.vocab, scheme, train_len, inputs(task, train_len))
    if parent is not None:
        load_parent(model, parent)
    if config.extension:
        extend(model, make_extension(config.extension), config.train_len)
    limit, need = model.max_len, inputs(task, config.train_len)
    if limit is not None and limit < need:
        raise UserError(
            f"{config.scheme_name}: max_len {limit} is shorter than the {need} positions of "
            f"train_len={config.train_len}; use scheme.max_len={need} or a smaller train_len"
        )
    return model


def inputs(task: Task, length: int) -> int:
    """Positions that a sequence of at most `length` tokens fills: its last token is no input."""
    return task.length(task.items(length)) - 1


def load_parent(model: Transformer, parent: Run) -> None:
    """Start from the weights of another run. A table that is longer here keeps its new rows."""
    own = model.state_dict()
    for name, tensor in parent.load_weights().items():
        if name not in own or own[name].shape[1:] != tensor.shape[1:]:
            raise UserError(
                f"init={parent.folder}: its weight {name} {tuple(tensor.shape)} does not fit this "
                "model; use the same scheme and model"
            )
        if tensor.ndim:
            rows = min(len(tensor), len(own[name]))
            own[name][:rows] = tensor[:rows]
        else:
            own[name].copy_(tensor)


def extend(model: Transformer, extension: Extension, length: int) -> None:
    """Put the model's schemes under a training-free extension for one evaluation length."""
    model.replace_schemes(lambda scheme: extension(scheme, length))


def load_weights(model: Transformer, run: Run) -> None:
    """Put the weights of a trained run into its model.

    Raises:
        UserError: they are not those of this model.
    """
    try:
        model.load_state_dict(run.load_weights())
    except RuntimeError as error:
        raise UserError(
            f"{run.folder}: the weights do not fit its config "
            f"({' '.join(str(error).split())[:200]}); {AGAIN}"
        ) from None


def load_plain(path: Path) -> dict[str, Any]:
    """A yaml of the catalogue as a plain dict."""
    try:
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # YAML parsers raise many classes
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(node, dict):
        raise UserError(f"{path} is not a mapping of keys")
    return {str(key): value for key, value in node.items()}


def load_yaml(path: Path, *extra: Path | None) -> dict[str, Any]:
    """A yaml that names a class or function, with its own name added and every scheme that it takes
    written out. `extra` are config folders of the user."""
    node = load_plain(path)
    if "_target_" not in node:
        raise UserError(f"{path} has no _target_: name the class or function it stands for")
    return _resolved({"name": path.stem, **node}, extra)


def check_trust(config: Config, trusted: tuple[str, ...]) -> None:
    """Refuse a saved config that names code outside posx and the packages that the user trusts.

    A run folder may come from a stranger, and a `_target_` calls whatever it names. Names are
    walked attribute by attribute, so `posx.runs.os.remove` would pass as part of posx: what counts
    is also where the thing itself was defined."""
    allowed = ("posx.schemes.", "posx.tasks.", *(f"{package}." for package in trusted))
    for node in (config.scheme, config.task, config.extension):
        for target in _targets(node):
            named = target.startswith(allowed)
            if not named or not _home(target).startswith(allowed):
                raise UserError(
                    f"the run's config names {target}, which is no scheme or task of posx: if you "
                    f"trust that code, add --trust {target.split('.')[0]}"
                )


def _home(target: str) -> str:
    """The module in which what `target` names was defined, with a dot at its end."""
    return f"{getattr(locate({'name': target, '_target_': target}), '__module__', '')}."


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


def locate(node: dict[str, Any]) -> Any:
    """The class or function that a yaml names.

    Raises:
        UserError: it cannot be imported.
    """
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it prints what it raises
    try:
        return get_object(node["_target_"])
    except Exception as error:  # whatever importing the user's module raises
        cause = error.__cause__ or error
        hint = "; its folder must be on PYTHONPATH" if isinstance(cause, ImportError) else ""
        raise UserError(
            f"{node['name']}: cannot import {node['_target_']} ({cause}){hint}"
        ) from None


def _instantiate(node: dict[str, Any], *arguments: Any, **more: Any) -> Any:
    """What `_target_` names, called with the arguments and the node's other keys."""
    call = {key: value for key, value in node.items() if key != "name"}
    _check_call(node["name"], locate(node), call, len(arguments))
    try:
        return instantiate(call, *arguments, **more)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, TypeError):  # an unknown or missing constructor key
            raise UserError(f"{node['name']}: {cause}") from None
        what = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
        raise UserError(f"{node['name']}: {' '.join(what.split())}") from error


def _hints(target: Any) -> dict[str, Any]:
    """The types of a constructor's or function's parameters."""
    return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)


def _kinds(hints: dict[str, Any], key: str) -> set[Any]:
    """The types that a key may have, null left out."""
    return {*(typing.get_args(hints.get(key)) or (hints.get(key),))} - {type(None)}


def _check_call(name: str, target: Any, call: dict[str, Any], given: int) -> None:
    """Refuse keys that a constructor does not take, and plain values of the wrong type.

    Raises:
        UserError: the key is named, with what there is.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # not callable, or written in C
        return
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    hints = _hints(target)
    known = list(signature.parameters)[given:]
    for key, value in call.items():
        if key.startswith("_"):
            continue
        if key not in known:
            raise UserError(
                f"no key {key!r} in {name}{catalog.nearest(key, known)}; there are: "
                f"{', '.join(known) or 'none'}"
            )
        if isinstance(value, dict) and "_target_" in value:
            node = {"name": f"{name}.{key}", **value}
            _check_call(node["name"], locate(node), value, 0)
        kinds: tuple[Any, ...] = typing.get_args(hints.get(key)) or (hints.get(key),)
        if not set(kinds) <= PLAIN.keys():
            continue
        fits = (int, *kinds) if float in kinds else kinds
        if not isinstance(value, fits) or (isinstance(value, bool) and bool not in kinds):
            shown = "null" if value is None else value
            allowed = " or ".join(PLAIN[kind] for kind in kinds)
            raise UserError(f"{name}: {key}={shown} must be {allowed}")
