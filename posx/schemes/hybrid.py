"""Hybrids: one scheme in some layers or heads, another in the rest; and a sink beside any scheme.

`Layers` picks by the layer and hands every hook on; `Heads` splits each hook between two groups of
heads. What acts before the first layer, `positions` and `embed`, cannot be split and is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Maker, Scheme, Site
from posx.schemes.bias import Alibi
from posx.schemes.combine import Over
from posx.schemes.temperature import check_softmax


def check_splits(name: str, scheme: Scheme, part: str) -> None:
    """Refuse a scheme that acts before the layers.

    Raises:
        UserError: it gives positions or changes the embeddings.
    """
    for hook, what in (("positions", "gives the positions"), ("embed", "changes the embeddings")):
        if scheme.overrides(hook):
            raise UserError(
                f"{name}: {type(scheme).__name__} {what} of the whole model and cannot be limited "
                f"to some {part}: take a scheme that acts in attention, such as rope or alibi"
            )


class Layers(Over):
    """Every `every`-th layer under `other`, the layers before it under `most`.

    RNoPE-SWA, Yang et al. 2025 (arXiv:2501.18795): layers 4, 8, ... are NoPE over all keys, the
    others RoPE; there and in Cohere's models those see a window, in SmolLM3 all keys. Llama 4's
    iRoPE (irope) gives the NoPE layers a temperature; that its RoPE layers see one chunk of 8192
    tokens only is left out. Each layer has its own scheme, also one that is otherwise shared (t5).
    A model with fewer layers than `every` has `most` alone.
    """

    shared = False

    def __init__(self, site: Site, most: Maker, other: Maker, every: int = 4) -> None:
        if every < 1:
            raise UserError(f"layers: every is {every}; it must be at least 1, usual is 4")
        super().__init__(site, most if (site.layer + 1) % every else other)
        check_splits("layers", self.over, "layers")


def _of_both(trait: str, join: Callable[[list[Any]], Any]) -> Any:
    """A class attribute that is made of those of both schemes: what one lacks, the whole lacks."""
    return property(lambda heads: join([getattr(part, trait) for part in heads.parts]))


def _widest(bands: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The band that holds both; none where one scheme has none."""
    there = [band for band in bands if band is not None]
    if len(there) < len(bands):
        return None
    return max(sinks for sinks, _ in there), max(window for _, window in there)


class Heads(Scheme):
    """The first heads under one scheme, the others under another. `n_first` null is half of them.

    NAPE, Vasylenko et al. 2025 (arXiv:2506.16640), has ALiBi with slopes 1 / h in one half, which
    looks near, and NoPE in the other, which looks anywhere. Each scheme is built for its own number
    of heads. Beyond the training length each half behaves as its scheme does. It has the parameters
    of both.
    """

    def __init__(self, site: Site, first: Maker, second: Maker, n_first: int | None = None) -> None:
        super().__init__(site)
        n = site.n_heads // 2 if n_first is None else n_first
        if not 0 < n < site.n_heads:
            raise UserError(
                f"heads: n_first is {n} of {site.n_heads} heads; each scheme needs at least one, "
                "so use model.n_heads=2 or more and scheme.n_first below it"
            )
        self.n_first = n
        self.first = first(replace(site, n_heads=n))
        self.second = second(replace(site, n_heads=site.n_heads - n))
        for part in self.parts:
            check_splits("heads", part, "heads")
        # How `prepare` laid both states out in one: trailing shape and number type of each.
        self.layout: list[tuple[tuple[int, ...], torch.dtype] | None] = [None, None]

    @property
    def parts(self) -> tuple[Scheme, Scheme]:
        """Both schemes, read anew as an extension may have changed them."""
        return self.first, self.second

    enters = _of_both("enters", lambda each: next((e for e in each if e != "mask"), "mask"))
    shared = _of_both("shared", all)
    relative = _of_both("relative", all)
    length_dependent = _of_both("length_dependent", any)
    kv = _of_both("kv", all)
    max_len = _of_both("max_len", lambda each: min(filter(None, each), default=None))
    band = _of_both("band", _widest)

    def overrides(self, hook: str) -> bool:
        if hook in ("positions", "embed", "far"):  # far: the halves reach differently far
            return False
        if hook == "fold":  # a half whose bias has no fold would lose it
            biased = [
                p for p in self.parts if p.overrides("scores") or p.overrides("distance_bias")
            ]
            return bool(biased) and all(part.overrides("fold") for part in biased)
        return any(part.overrides(hook) for part in self.parts)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        inputs = zip(
            self.parts, self._split(q), self._split(k), self._split(v), self._states(past),
            strict=True,
        )  # fmt: skip
        done = [p.prepare(x, a, b, c, pos, old) for p, a, b, c, old in inputs]
        queries, keys, values, states = zip(*done, strict=True)
        q, k, v = (torch.cat(halves, 1) for halves in (queries, keys, values))  # (B, H, T, D)
        self.layout = [None if s is None else (s.shape[2:], s.dtype) for s in states]
        flat = [s.reshape(*s.shape[:2], -1) for s in states if s is not None]
        if self._mixed():  # whole numbers beside bfloat16 would keep 8 bits
            flat = [columns.double() for columns in flat]
        return q, k, v, torch.cat(flat, -1) if flat else None  # (B, T, W of first and second)

    def _mixed(self) -> bool:
        """Whether one state holds whole numbers and the other does not."""
        return len({layout[1].is_floating_point for layout in self.layout if layout}) == 2

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        inputs = zip(
            self.parts, self._split(z), self._split(q), self._split(k), self._states(state),
            strict=True,
        )  # fmt: skip
        return torch.cat([p.scores(a, b, c, i, j, own) for p, a, b, c, own in inputs], 1)

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        masks = [part.mask(i, j) for part in self.parts]
        if masks[0] is None and masks[1] is None:
            return None
        every = torch.ones(i.shape[-1], j.shape[-1], dtype=torch.bool, device=i.device)
        masks = [every if mask is None else mask for mask in masks]
        return self._join([mask if mask.ndim > 2 else mask[None] for mask in masks])

    def value(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        halves = self._split(p)
        extra = [part.value(own, i, j) for part, own in zip(self.parts, halves, strict=True)]
        if extra[0] is None and extra[1] is None:
            return None
        width = self.site.d_head
        return torch.cat(
            [
                own.new_zeros(*own.shape[:-1], width) if term is None else term
                for term, own in zip(extra, halves, strict=True)
            ],
            1,
        )  # (B, H, T, D)

    def normalize(self, z: Tensor) -> Tensor:
        halves = zip(self.parts, self._split(z), strict=True)
        weights = [part.normalize(own) for part, own in halves]
        wide = torch.promote_types(weights[0].dtype, weights[1].dtype)
        return torch.cat([p.to(wide) for p in weights], 1)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both folds side by side, a narrower one or none filled up with zeros."""
        folds = [
            part.fold(pos, own) if part.overrides("fold") else None
            for part, own in zip(self.parts, self._states(state), strict=True)
        ]
        there = [fold for fold in folds if fold is not None]
        width = max(extra.shape[-1] for fold in there for extra in fold)
        empty = there[0][0].new_zeros(1, 1, pos.shape[-1], 1)
        padded = [
            [
                nn.functional.pad(extra, (0, width - extra.shape[-1]))
                for extra in fold or (empty, empty)
            ]
            for fold in folds
        ]
        query, key = (self._join([extras[n] for extras in padded]) for n in range(2))
        return query, key

    def distance_bias(self, d: Tensor) -> Tensor:
        biases = [
            part.distance_bias(d) if part.overrides("distance_bias") else None
            for part in self.parts
        ]
        given = next(bias for bias in biases if bias is not None)
        return torch.cat(
            [
                given.new_zeros(part.site.n_heads, *d.shape) if bias is None else bias.to(given)
                for part, bias in zip(self.parts, biases, strict=True)
            ]
        )  # (H, *d.shape)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (B, H, ...) -> the heads of the first and of the second scheme."""
        return x[:, : self.n_first], x[:, self.n_first :]

    def _join(self, halves: Sequence[Tensor]) -> Tensor:
        """(..., 1 or own heads, T, S or F) of both -> (..., H, T, S or F)."""
        batch = torch.broadcast_shapes(*(half.shape[:-3] for half in halves))
        return torch.cat(
            [
                half.expand(*batch, part.site.n_heads, *half.shape[-2:])
                for part, half in zip(self.parts, halves, strict=True)
            ],
            -3,
        )

    def _states(self, state: Tensor | None) -> list[Tensor | None]:
        """The state of each scheme, as its own `prepare` returned it. state: (B, S, W) or None."""
        own: list[Tensor | None] = []
        start = 0
        for layout in self.layout:
            if state is None or layout is None:
                own.append(None)
                continue
            shape, dtype = layout
            columns = state[..., start : start + math.prod(shape)]
            start += math.prod(shape)
            back = columns.reshape(*state.shape[:2], *shape)  # (B, S, ...)
            kept = dtype.is_floating_point and not self._mixed()
            own.append(back if kept else back.to(dtype))
        return own


class LinearAlibi(Alibi):
    """b_h(d) = -d / h, h = 1 .. H: ALiBi with slopes that fall slowly from 1.

    Vasylenko et al. 2025 (arXiv:2506.16640), for the ALiBi heads of NAPE, by their code. Steeper
    than ALiBi throughout: at 4 heads 1 to 1/4 where ALiBi has 1/4 to 1/256. No parameters.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.constant("slopes", 1 / torch.arange(1, site.n_heads + 1, dtype=torch.float64))  # (H,)

    def overrides(self, hook: str) -> bool:
        """No fold: at slope 1 and 1024 tokens it would round a score by 1e-4."""
        return hook != "fold" and super().overrides(hook)


class AttnSink(Over):
    """p_ij = e^z_ij / (e^s_h + sum_j e^z_ij): a trained number s a head that takes weight and gives
    nothing, so that a query may look at no key.

    gpt-oss, OpenAI 2025 (arXiv:2508.10925), beside windows, over any scheme that keeps the softmax.
    Not positional: a control for windows, which lose the first token as a sink. s starts at `init`,
    0 as in x-transformers; gpt-oss draws it. n_heads parameters a layer.
    """

    enters = "softmax"

    def __init__(self, site: Site, over: Maker, init: float = 0.0) -> None:
        super().__init__(site, over)
        check_softmax("attn_sink", self.over)
        self.sink = nn.Parameter(torch.full((site.n_heads,), init))

    def normalize(self, z: Tensor) -> Tensor:
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        sink = self.sink.to(z)[:, None, None].expand(*z.shape[:-1], 1)  # (B, H, T, 1)
        return torch.cat([z, sink], -1).softmax(-1)[..., :-1]
