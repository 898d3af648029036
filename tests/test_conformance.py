"""Every scheme of the catalogue passes the conformance suite, and broken ones do not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from posx import build, catalog, conformance
from posx.conformance import CHECKS, Subject
from posx.schemes.base import Scheme, Site

SCHEMES = catalog.files("scheme")


def subject(name: str) -> Subject:
    path = SCHEMES[name]
    return Subject(name, partial(build.make_scheme, build.load_yaml(path)), catalog.card(path))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name: str, check: Callable[[Subject], None]) -> None:
    check(subject(name))


class Leaks(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)  # of all tokens, later ones included


class WrongOffset(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def positions(self, n: int, offset: int, generator: torch.Generator | None) -> Tensor:
        return torch.arange(n)  # forgets what is cached

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x * (1 + pos[:, None] * torch.linspace(0, 0.1, x.shape[-1]))


class NotRelative(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    relative = True

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q + pos[:, None] / 100, k, v, None


class DeadParameter(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.weight = torch.nn.Parameter(torch.ones(3))


class CountsBatch(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x * len(x)


class ForgetsItself(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    shape = 0

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        self.shape = max(self.shape, x.shape[1])  # a cache that grows with the longest input
        return x * self.shape


class HalfPositions(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    max_len = 4

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x  # promises a limit and does not keep it


BROKEN = {
    Leaks: "check_causal",
    WrongOffset: "check_cached_decoding",
    NotRelative: "check_shift",
    DeadParameter: "check_gradients",
    CountsBatch: "check_batch_rows_independent",
    ForgetsItself: "check_deterministic",
    HalfPositions: "check_long_lengths",
}


@pytest.mark.parametrize(("broken", "check"), BROKEN.items(), ids=lambda value: str(value))
def test_broken_scheme_is_caught(broken: type[Scheme], check: str) -> None:
    failed = {
        f"check_{result.check.replace(' ', '_')}"
        for result in conformance.run(Subject("broken", broken, "Broken: a mutant"))
        if not result.passed
    }
    assert check in failed


class Undocumented(Scheme):
    """No source at all."""


def test_a_scheme_without_a_source_is_caught() -> None:
    results = conformance.run(Subject("undocumented", Undocumented, "Undocumented: a mutant"))
    assert [result.check for result in results if not result.passed] == ["documented"]
