"""What a run is made of, typed and checked. DictConfig objects stop here.

A config is composed by Hydra from configs/train.yaml, checked by `from_node`, and saved resolved in
the run folder, from where `loads` brings it back.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posx.errors import UserError
from posx.runs import AGAIN, SCHEMA

T = TypeVar("T")


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value} is not known: use {' | '.join(allowed)}")


def at_least(minimum: float, **values: float) -> None:
    for key, value in values.items():
        if not minimum <= value < math.inf:  # nan is neither
            raise UserError(f"{key.replace('__', '.')}={value}: must be at least {minimum}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the Transformer; see posx/model.py for the initial laws."""

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_ff: int
    norm: str  # layernorm | rmsnorm
    activation: str  # gelu | relu | relu2
    head: str  # tied_projected | tied | untied
    init_std: float

    def __post_init__(self) -> None:
        one_of("model.norm", self.norm, ("layernorm", "rmsnorm"))
        one_of("model.activation", self.activation, ("gelu", "relu", "relu2"))
        one_of("model.head", self.head, ("tied_projected", "tied", "untied"))
        at_least(
            1,
            model__n_layers=self.n_layers,
            model__d_model=self.d_model,
            model__n_heads=self.n_heads,
            model__d_head=self.d_head,
            model__d_ff=self.d_ff,
        )
        at_least(0, model__init_std=self.init_std)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and clipping; posx/optim.py says which parameter goes where."""

    matrices: str  # muon | adamw: what trains the matrices of the blocks
    lr: float  # peak learning rate of AdamW
    matrix_lr: float  # peak learning rate of the matrices
    beta1: float
    beta2: float
    weight_decay: float  # on matrices only
    clip: float  # gradient norm
    warmup_steps: int

    def __post_init__(self) -> None:
        one_of("optim.matrices", self.matrices, ("muon", "adamw"))
        at_least(
            0,
            optim__lr=self.lr,
            optim__matrix_lr=self.matrix_lr,
            optim__weight_decay=self.weight_decay,
        )
        at_least(1, optim__warmup_steps=self.warmup_steps)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UserError(f"optim.{name}={beta}: must be at least 0 and below 1")
        if not self.clip > 0:
            raise UserError(f"optim.clip={self.clip}: must be above 0; inf does not clip")


@dataclass(frozen=True)
class TrainConfig:
    """The training law: which lengths are drawn, and when training ends."""

    lengths: str  # uniform | fixed | curriculum
    curriculum_steps: int  # steps over which the curriculum reaches train_len
    tokens_per_step: int
    max_steps: int
    check_every: int  # steps between checks at train_len
    check_sequences: int
    target: float  # accuracy of a check, whole answer and last tenth, that begins the end
    decay_steps: int  # from there to the end
    converged_at: float  # accuracy of the last check that makes a converged run
    average: float  # decay of the running mean of the weights
    checkpoint_every: int  # steps

    def __post_init__(self) -> None:
        one_of("train.lengths", self.lengths, ("uniform", "fixed", "curriculum"))
        at_least(
            1,
            train__tokens_per_step=self.tokens_per_step,
            train__max_steps=self.max_steps,
            train__check_every=self.check_every,
            train__check_sequences=self.check_sequences,
            train__decay_steps=self.decay_steps,
            train__curriculum_steps=self.curriculum_steps,
            train__checkpoint_every=self.checkpoint_every,
        )
        if not 0 <= self.average < 1:
            raise UserError(f"train.average={self.average}: must be at least 0 and below 1")


@dataclass(frozen=True)
class Config:
    """One run. Everything here but `device` and `threads` decides the result and enters the
    hash."""

    scheme: dict[str, Any]  # name, _target_ and the scheme's parameters
    task: dict[str, Any]
    extension: dict[str, Any] | None  # applied to the trained parent before training goes on
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    train_len: int
    seed: int
    data_seed: int
    init: str | None  # the run that training starts from: a folder, once resolved its hash
    init_len: int | None  # train_len of that run
    dtype: str
    device: str
    threads: int

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("float32", "float64", "bfloat16"))
        at_least(5, train_len=self.train_len)
        at_least(0, seed=self.seed, data_seed=self.data_seed)
        at_least(1, threads=self.threads)
        if self.extension is not None and self.init is None:
            raise UserError(
                "extension=... changes a trained run: name that run with init=RUN, or evaluate it "
                "with `posx eval --extend ...`"
            )

    @property
    def scheme_name(self) -> str:
        return self.scheme["name"]

    @property
    def task_name(self) -> str:
        return self.task["name"]

    def digest(self) -> str:
        """Hash of all that decides the result: same config, same folder."""
        return _digest(self, leave_out=())

    def group(self, parent: str | None = None) -> str:
        """Hash of the configuration without its seeds: runs that may be averaged share it. `parent`
        is the group of the run that training started from."""
        return _digest(replace(self, init=parent or self.init), leave_out=("seed", "data_seed"))

    def dumps(self) -> str:
        """The config as YAML text."""
        return OmegaConf.to_yaml(OmegaConf.create(_plain(self)))

    def with_parent(self, digest: str, train_len: int) -> "Config":
        """The same run with its parent resolved: the hash of the parent, not a path."""
        return replace(self, init=digest, init_len=train_len)


def from_node(node: DictConfig, choices: dict[str, str | None]) -> Config:
    """A composed config as a Config. `choices` names the yaml chosen for each group.

    Raises:
        UserError: a value of the wrong type or out of its range; the key is named.
    """
    values = _container(node)
    values.setdefault("extension", None)
    for group in ("scheme", "task", "extension"):
        if values.get(group):
            values[group] = {"name": choices.get(group), **values[group]}
    return _config(values)


def loads(text: str, where: str) -> Config:
    """The config of a run folder, from its text.

    Raises:
        UserError: it is not one; `where` is named.
    """
    try:
        node = OmegaConf.create(text)
        if not isinstance(node, DictConfig):
            raise UserError("not a mapping")
        return _config(_container(node))
    except Exception as error:  # YAML parsers raise many classes
        raise UserError(
            f"{where}/config.yaml is not a posx config: {_first_line(error)}; {AGAIN}"
        ) from None


def _config(values: dict[str, Any]) -> Config:
    parts = {"model": ModelConfig, "optim": OptimConfig, "train": TrainConfig}
    known = {field.name for field in fields(Config)}
    if missing := known - values.keys():
        raise UserError(f"the config lacks {', '.join(sorted(missing))}")
    if extra := values.keys() - known - {"results_dir", "eval"}:
        raise UserError(_unknown_key("", min(extra), known))
    typed = {key: value for key, value in values.items() if key in known}
    for key in ("scheme", "task", "extension", *parts):
        if not isinstance(typed[key], dict) and not (key == "extension" and typed[key] is None):
            raise UserError(f"{key}={_yaml(typed[key])}: {key} is a group of keys, not a value")
    for key, kind in parts.items():
        typed[key] = _typed(kind, typed[key], prefix=f"{key}.")
    for key in ("train_len", "seed", "data_seed", "threads"):
        if not isinstance(typed[key], int) or isinstance(typed[key], bool):
            raise UserError(f"{key}={_yaml(typed[key])}: must be a whole number")
    for key in ("dtype", "device"):
        if not isinstance(typed[key], str):
            raise UserError(f"{key}={_yaml(typed[key])}: must be a name")
    return Config(**typed)


def _typed(kind: type[T], values: dict[str, Any], prefix: str) -> T:
    """values as an instance of a dataclass, types checked by OmegaConf."""
    names = {field.name: field.type for field in fields(kind)}  # ty: ignore[invalid-argument-type]
    for key in values:
        if key not in names:
            raise UserError(_unknown_key(prefix, key, names))
    if missing := [name for name in names if name not in values]:
        raise UserError(f"the config lacks {prefix}{missing[0]}")
    schema = OmegaConf.structured(kind)
    OmegaConf.set_readonly(schema, False)
    try:
        merged = OmegaConf.merge(schema, OmegaConf.create(values))
        result = OmegaConf.to_object(merged)
    except UserError:
        raise
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        wanted = {int: "a whole number", float: "a number", str: "a name"}.get(names.get(key))
        if wanted is None:
            raise UserError(f"{prefix}{key}: {_first_line(error)}") from None
        raise UserError(f"{prefix}{key}={_yaml(values[key])}: must be {wanted}") from None
    assert isinstance(result, kind)
    return result


def _unknown_key(prefix: str, key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f" (did you mean '{prefix}{close[0]}'?)" if close else ""
    return f"no key '{prefix}{key}'{hint}; there are: {', '.join(sorted(known))}"


def _yaml(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value)


def _container(node: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_first_line(error)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _plain(config: Config) -> dict[str, Any]:
    """The config as plain containers, in the order of its fields."""
    plain: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, ModelConfig | OptimConfig | TrainConfig):
            value = {part.name: getattr(value, part.name) for part in fields(value)}
        plain[field.name] = value
    return plain


def _digest(config: Config, leave_out: tuple[str, ...]) -> str:
    plain = _plain(config)
    for key in ("device", "threads", *leave_out):
        del plain[key]
    text = json.dumps({"schema": SCHEMA, **plain}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
