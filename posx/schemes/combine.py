"""Schemes around a scheme: any of the catalogue, named by its yaml or given by its keys.

    scheme=randomized scheme.over=learned
    scheme=randomized 'scheme.over={name: rope, base: 500000}'

`Over` hands every hook on; what builds on it changes a few. Temperatures and sampled positions are
in files of their own.
"""

from typing import Any

import torch
from torch import Tensor

from posx.schemes.base import Maker, Scheme, Site


def of_over(trait: str) -> Any:
    """A class attribute that is read from the inner scheme."""
    return property(lambda scheme: getattr(scheme.over, trait))


class Over(Scheme):
    """Another scheme, unchanged: the ground for schemes that change one hook of any other."""

    def __init__(self, site: Site, over: Maker) -> None:
        super().__init__(site)
        self.over = over(site)

    # The traits are those of the inner scheme, whatever an extension may later put in its place.
    enters = of_over("enters")
    shared = of_over("shared")
    relative = of_over("relative")
    length_dependent = of_over("length_dependent")
    kv = of_over("kv")
    max_len = of_over("max_len")
    band = of_over("band")
    reach = of_over("reach")

    def overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Over, hook) or self.over.overrides(hook)

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        return self.over.positions(symbols, offset, generator)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.over.embed(x, pos)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.over.prepare(x, q, k, v, pos, past)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        return self.over.scores(z, q, k, i, j, state)

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        return self.over.mask(i, j)

    def value(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        return self.over.value(p, i, j)

    def normalize(self, z: Tensor) -> Tensor:
        return self.over.normalize(z)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.over.fold(pos, state)

    def distance_bias(self, d: Tensor) -> Tensor:
        return self.over.distance_bias(d)

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.over.far(q, i, j, state)
