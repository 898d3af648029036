"""What every scheme and every extension declares, read from the yaml files."""

import copy
import inspect
import re
import typing
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import SITE

from posx import build, catalog
from posx.errors import UserError
from posx.schemes.base import Maker

SCHEMES, EXTENSIONS = catalog.files("scheme"), catalog.files("extension")
ALL = [*SCHEMES.values(), *EXTENSIONS.values()]
IDS = [f"{path.parent.name}-{path.stem}" for path in ALL]
NO_PAPER = {"clip", "wrap"}


@pytest.mark.parametrize("path", ALL, ids=IDS)
def test_card_names_its_source(path: Path) -> None:
    card = catalog.card(path)
    assert card.isascii()
    source = re.search(r"\(.* \d{4}.*(arXiv:\d{4}\.\d{4,5}|https?://\S+)\)", card)
    assert source or path.stem in NO_PAPER


@pytest.mark.parametrize("path", ALL, ids=IDS)
def test_yaml_states_every_parameter(path: Path) -> None:
    stated = build.load_plain(path)
    what = build.locate({"name": path.stem, **stated})
    given = 1 if path.parent.name == "scheme" else 2  # site; scheme and length
    assert list(stated) == ["_target_", *list(inspect.signature(what).parameters)[given:]]


@pytest.mark.parametrize("path", ALL, ids=IDS)
def test_the_first_yaml_of_a_class_has_its_defaults(path: Path) -> None:
    """Other yaml files of the same class are its variants: they differ somewhere, be it only in
    the schemes that they are built around, which have no default."""
    stated = build.load_plain(path)
    target = stated.pop("_target_")
    same = [each for each in ALL if build.load_plain(each)["_target_"] == target]
    parameters = inspect.signature(build.locate({"name": "", "_target_": target})).parameters
    defaults = [
        name
        for name in same
        if all(
            parameters[key].default in (value, inspect.Parameter.empty)
            for key, value in build.load_plain(name).items()
            if key != "_target_"
        )
    ]
    inner = any(hint == Maker for hint in _hints(target).values())
    assert len(defaults) == 1 or (inner and defaults), f"with the defaults of {target}: {defaults}"
    others = [build.load_plain(each) for each in same if each != path]
    assert {"_target_": target, **stated} not in others


@pytest.mark.parametrize("path", SCHEMES.values(), ids=SCHEMES)
def test_copies_and_shifted_precision_keep_the_scheme(path: Path) -> None:
    """bfloat16 casts parameters; constants stay as they were built, on every path."""
    scheme = build.make_scheme(build.load_yaml(path), SITE)
    kept = set(scheme.state_dict())
    constants = {n: b.clone() for n, b in scheme.named_buffers() if n not in kept}
    for changed in (copy.deepcopy(scheme).to(torch.bfloat16), copy.deepcopy(scheme).half().float()):
        for n, b in changed.named_buffers():
            if n in constants:
                assert b.dtype == constants[n].dtype
                assert torch.equal(b, constants[n])
    cast = copy.deepcopy(scheme).to(torch.bfloat16)
    assert {p.dtype for p in cast.parameters()} <= {torch.bfloat16}
    assert {b.device.type for b in cast.to("meta").buffers()} <= {"meta"}  # they move with it


@pytest.mark.parametrize("path", EXTENSIONS.values(), ids=EXTENSIONS)
def test_extension_applies_to_schemes_of_the_catalogue(path: Path) -> None:
    extension = build.make_extension(build.load_yaml(path))
    fitting = [name for name, each in SCHEMES.items() if extension.fits(build.load_yaml(each))]
    assert fitting
    for name in fitting:
        scheme = build.make_scheme(build.load_yaml(SCHEMES[name]), SITE)
        # one that counts keys by their positions refuses positions that do not, in a sentence
        refuses = suppress(UserError) if scheme.overrides("positions") else nullcontext()
        with refuses:
            assert type(extension(scheme, 3 * SITE.train_len)) is not None


def _hints(target: str) -> dict[str, Any]:
    what = build.locate({"name": "", "_target_": target})
    return typing.get_type_hints(what.__init__ if inspect.isclass(what) else what)


def test_schemes_inside_schemes_are_typed() -> None:
    """A parameter that holds a scheme's name says so with its type."""
    for path in SCHEMES.values():
        node = build.load_plain(path)
        hints = _hints(node["_target_"])
        for key, value in node.items():
            if isinstance(value, str) and value in SCHEMES:
                assert hints[key] == Maker, f"{path.stem}.{key}"
