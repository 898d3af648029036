"""Sampled positions: training draws the positions that an inner scheme sees.

    0, 1, ..., n - 1  ->  drawn numbers p_0, ..., p_n-1        hook: positions

A model that has met large or irregular positions in short sequences has little new to meet in long
ones. Two of these read the symbols as well: tokens that belong together share a position.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes.absolute import Sinusoidal
from posx.schemes.base import Maker, Site
from posx.schemes.bias import Alibi
from posx.schemes.combine import Over
from posx.schemes.rotary import Rope


class Drawn(Over):
    """The ground for schemes that choose the positions of an inner one, which is built `inside`, a
    site whose training length is the range of those positions."""

    name: ClassVar[str]  # in the catalogue
    enters = "positions"

    def __init__(self, site: Site, over: Maker, inside: Site) -> None:
        super().__init__(site, lambda _: over(inside))
        if self.over.overrides("positions"):
            raise UserError(
                f"{self.name}: {self._inner} chooses positions as well, and only one can: use a "
                "scheme that takes them, such as scheme.over=rope"
            )

    @property
    def _inner(self) -> str:
        return f"{type(self.over).__name__} inside it"

    def _need_rows(self, need: int) -> None:
        """Refuse an inner scheme that cannot tell as many positions apart.

        Raises:
            UserError: its limit is lower.
        """
        rows = self.over.max_len
        if rows is not None and rows < need:
            raise UserError(
                f"{self.name}: max_len {rows} of the {self._inner} is below the {need} positions "
                "that training draws from: leave it out or raise it"
            )

    def _need_reals(self) -> None:
        """Refuse an inner scheme that has no value between whole positions.

        Raises:
            UserError: it reads a table or counts in buckets.
        """
        if not isinstance(self.over, Sinusoidal | Rope | Alibi):
            raise UserError(
                f"{self.name}: {self._inner} has no value between whole positions: use "
                "scheme.over=sinusoidal, rope or alibi"
            )

    def _need_no_order(self) -> None:
        """Refuse an inner scheme that wants positions to rise from token to token.

        Raises:
            UserError: position enters its scores or mask, where a distance below 0 has no meaning.
        """
        if any(self.over.overrides(hook) for hook in ("scores", "distance_bias", "mask", "value")):
            raise UserError(
                f"{self.name}: {self._inner} needs positions that rise from token to token, and "
                "these start again: use scheme.over=learned, sinusoidal or rope"
            )


class Randomized(Drawn):
    """p = a sorted sample of n different numbers of 0 .. max_len - 1, drawn anew every step.

    Ruoss et al. 2023 (arXiv:2305.16843). Every length up to max_len is made of positions that
    training has met; above max_len there are none. Evaluation draws as well, `evaluate=seeded`: one
    fixed sample for each n; `evaluate=grid` takes the even grid floor(t max_len / n) instead. Both
    move all positions when n grows, so keys cannot be cached. The published code shares one draw
    among the sequences of a batch (per_sequence=false), draws anew in every layer of RoPE and at
    every evaluation, and samples distances instead of positions for relative schemes and ALiBi;
    here all layers and schemes get the same positions. No parameters of its own.
    """

    name = "randomized"
    kv = False
    length_dependent = True
    max_len: Any = None  # set by the constructor: not that of the inner scheme

    def __init__(
        self,
        site: Site,
        over: Maker,
        max_len: int = 2048,
        evaluate: str = "seeded",
        per_sequence: bool = False,
    ) -> None:
        if max_len < 1:
            raise UserError(
                f"randomized: max_len is {max_len}; it must be at least the longest length that "
                "will be evaluated, the paper has 2048"
            )
        if evaluate not in ("seeded", "grid"):
            raise UserError(f"randomized: evaluate {evaluate!r} is not known: use seeded or grid")
        super().__init__(site, over, replace(site, train_len=max_len, seen=max_len))
        self._need_rows(max_len)
        self.max_len = max_len
        self.evaluate = evaluate
        self.per_sequence = per_sequence

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        n = offset + symbols.shape[1]
        if n > self.max_len:
            raise UserError(
                f"randomized: length {n} is beyond max_len {self.max_len}, the positions that can "
                f"be drawn: train with scheme.max_len={n} or more"
            )
        if generator is not None:
            rows = len(symbols) if self.per_sequence else 1
            drawn = sorted_sample(rows, n, self.max_len, generator)  # (B or 1, S)
            drawn = drawn if self.per_sequence else drawn[0]  # (B, S) or (S,)
        elif self.evaluate == "grid":
            drawn = torch.arange(n) * self.max_len // n  # (S,)
        else:
            drawn = sorted_sample(1, n, self.max_len, torch.Generator().manual_seed(n))[0]  # (S,)
        return drawn[..., offset:].to(symbols.device)


def sorted_sample(rows: int, n: int, width: int, generator: torch.Generator) -> Tensor:
    """n different numbers of 0 .. width - 1 in ascending order, all sets equally likely: (rows, n).

    They are the places of the n largest of `width` random keys.
    """
    keys = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    return keys.topk(n).indices.sort(-1).values


class Shape(Drawn):
    """p = i + k with k drawn from 0 .. max_shift for every sequence of training (unverified: k = 0
    in evaluation).

    SHAPE, Kiyono et al. 2021 (arXiv:2109.05644), there over sinusoidal positions. Absolute
    positions up to train_len + max_shift are met in training, distances up to train_len alone.
    Evaluation has k = eval_shift; the published code has max_shift there, and draws from
    0 .. max_shift - 1. A learned table inside gets its train_len + max_shift rows. No
    parameters of its own. A scheme that sees distances alone is refused: a shift changes nothing.
    """

    name = "shape"
    max_len: Any = property(lambda scheme: scheme._tokens())

    def __init__(self, site: Site, over: Maker, max_shift: int = 500, eval_shift: int = 0) -> None:
        if max_shift < 0 or eval_shift < 0:
            raise UserError(
                f"shape: max_shift is {max_shift} and eval_shift {eval_shift}; both must be at "
                "least 0, the paper has max_shift 500"
            )
        more = {"train_len": site.train_len + max_shift, "seen": site.positions + max_shift}
        super().__init__(site, over, replace(site, **more))
        if self.over.relative:
            raise UserError(
                f"shape: {type(self.over).__name__} sees distances alone, which a shift leaves as "
                "they are: use an absolute scheme, such as scheme.over=sinusoidal"
            )
        self._need_rows(more["seen"])
        self.max_shift = max_shift
        self.eval_shift = eval_shift

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        batch, n_tokens = symbols.shape
        if self.max_len is not None and offset + n_tokens > self.max_len:
            raise UserError(
                f"shape: length {offset + n_tokens} is beyond max_len {self.max_len}, for which "
                "the table inside has rows: use a longer one or scheme.over=sinusoidal"
            )
        place = torch.arange(offset, offset + n_tokens, device=symbols.device)  # (T,)
        if generator is None:
            return place + self.eval_shift
        shift = torch.randint(self.max_shift + 1, (batch, 1), generator=generator)
        return place + shift.to(symbols.device)  # (B, T)

    def _tokens(self) -> int | None:
        """How many tokens have rows in evaluation, where positions start at eval_shift."""
        rows = self.over.max_len
        return None if rows is None else max(0, rows - self.eval_shift)


class Cape(Drawn):
    """p = (i + D + e_i) exp(l): a random shift, jitter and stretch of real positions in training.

    CAPE, Likhomanenko et al. 2021 (arXiv:2106.03143), over sinusoidal positions. For every
    sequence, D is uniform in +-global_shift and l in +-ln global_scaling; e_i is uniform in
    +-local_shift for every token, which keeps their order up to 0.5. Evaluation has p = i, so what
    lies beyond the training length by more than shift and stretch is as new as without them. The
    defaults are those for text. For speech the paper subtracts the mean position first, which no
    causal model can know, so that is not here. No parameters of its own.
    """

    name = "cape"

    def __init__(
        self,
        site: Site,
        over: Maker,
        global_shift: float = 5.0,
        local_shift: float = 0.5,
        global_scaling: float = 1.03,
    ) -> None:
        super().__init__(site, over, site)
        if min(global_shift, local_shift) < 0 or global_scaling < 1:
            raise UserError(
                f"cape: global_shift {global_shift}, local_shift {local_shift} and global_scaling "
                f"{global_scaling}; shifts must be at least 0 and the scaling at least 1, the "
                "paper has 5, 0.5 and 1.03"
            )
        self._need_reals()
        self.global_shift = global_shift
        self.local_shift = local_shift
        self.global_scaling = global_scaling

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        place = super().positions(symbols, offset, generator)  # (T,)
        if generator is None:
            return place
        batch, n_tokens = symbols.shape
        shift, stretch = (2 * torch.rand(2, batch, 1, generator=generator) - 1).unbind(0)  # (B, 1)
        jitter = 2 * torch.rand(batch, n_tokens, generator=generator) - 1  # (B, T)
        noise = self.global_shift * shift + self.local_shift * jitter  # (B, T)
        stretch = self.global_scaling**stretch  # (B, 1)
        return (place + noise.to(place.device)) * stretch.to(place.device)  # (B, T)


class Rfs(Drawn):
    """p = scale times n sorted uniform numbers of [0, 1), drawn for every training sequence
    (unverified: the scale, and the rules beyond what a note on the paper's Algorithm 1 says).

    Random float sampling, Shimizu et al. 2026 (arXiv:2602.14050). Evaluation has the fixed
    p_i = scale (2i - 1) / (2 max(L, n)) for i = 1 .. n, with L the positions that training fills.
    All lengths share one range; beyond L the gaps shrink, and below it they stay, so keys of longer
    inputs cannot be cached. `scale` null is L, which makes the mean gap of training 1; the bare
    numbers of [0, 1) would turn the fastest pair by one radian in all. Takes schemes that know what
    lies between whole positions. No parameters of its own.
    """

    name = "rfs"
    kv = False
    length_dependent = True

    def __init__(self, site: Site, over: Maker, scale: float | None = None) -> None:
        super().__init__(site, over, site)
        if scale is not None and scale <= 0:
            raise UserError(f"rfs: scale is {scale}; it must be above 0, or null for train_len")
        self._need_reals()
        self.scale = site.positions if scale is None else scale

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        batch, n = len(symbols), offset + symbols.shape[1]
        if generator is None:
            drawn = (torch.arange(n) + 0.5) / max(self.site.positions, n)  # (S,)
        else:
            drawn = torch.rand(batch, n, generator=generator).sort(-1).values  # (B, S)
        return (self.scale * drawn[..., offset:]).to(symbols.device)


class Pose(Drawn):
    """p = i in a first chunk of the tokens and i + u in the rest, u drawn from 0 .. target_len - n.

    PoSE, Zhu et al. 2023 (arXiv:2309.10400), with the two chunks of the paper's experiments. The
    first has 1 .. (n + 1) / 2 tokens, as the published code draws them, anew for every sequence of
    training; evaluation has p = i. All distances below target_len are met in training, the large
    ones only across the gap. The paper fine-tunes a trained RoPE under position interpolation;
    from scratch there is nothing to interpolate. No parameters of its own.
    """

    name = "pose"

    def __init__(self, site: Site, over: Maker, target_len: int = 2048) -> None:
        if target_len < site.positions:
            raise UserError(
                f"pose: target_len is {target_len}; it must be at least the {site.positions} "
                "positions of training, usual is the longest length that will be evaluated"
            )
        super().__init__(site, over, replace(site, train_len=target_len, seen=target_len))
        self._need_rows(target_len)
        self.target_len = target_len

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        place = super().positions(symbols, offset, generator)  # (T,)
        if generator is None:
            return place
        batch, n = len(symbols), offset + symbols.shape[1]
        room = max(0, self.target_len - n)
        first = torch.randint(1, (n + 1) // 2 + 1, (batch, 1), generator=generator)
        skip = torch.randint(room + 1, (batch, 1), generator=generator)
        second = place >= first.to(place.device)  # (B, T)
        return place + second * skip.to(place.device)


class Abacus(Drawn):
    """p = k + place in the run of symbols, counted from 1; 0 at BOS, SEP and EOS.

    McLeish et al. 2024 (arXiv:2405.17399), over a learned table; their numbers become our payload
    and answer. One k of 0 .. max_shift a training step, 0 in evaluation, trains rows up to the
    training length plus max_shift; beyond them rows are as they were drawn. `max_len` is the
    longest run, and the longest sequence too, as it could be one: (max_len + 1) d_model
    parameters. It knows where the task's parts begin. The place depends on all earlier tokens, so
    keys are not cached.
    """

    name = "abacus"
    kv = False
    max_len: Any = None  # set by the constructor: not that of the inner scheme

    def __init__(self, site: Site, over: Maker, max_len: int = 1023, max_shift: int = 99) -> None:
        if max_len < 1 or max_shift < 0:
            raise UserError(
                f"abacus: max_len is {max_len} and max_shift {max_shift}; they must be at least 1 "
                "and 0, the paper's code has 1023 and 99"
            )
        seen = min(max_len, site.positions + max_shift) + 1
        super().__init__(site, over, replace(site, train_len=max_len + 1, seen=seen))
        self._need_rows(max_len + 1)
        self._need_no_order()
        self.max_len = max_len
        self.max_shift = max_shift

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        place = places(symbols)  # (B, T)
        longest = _longest("abacus", place, self.max_len)
        if generator is None:
            return place
        room = min(self.max_shift, self.max_len - longest)
        shift = int(torch.randint(room + 1, (1,), generator=generator))
        return place + shift * symbols


class PosCoupling(Drawn):
    """p = s + place in the run of symbols, counted from 1; s at SEP, 0 at BOS and EOS.

    Position coupling, Cho et al. 2024 (arXiv:2405.20671), as its code has the copy task, over a
    learned table: x_i and y_i share a position, and SEP, from which y_1 is predicted, has the one
    before. s is drawn from 1 .. max_len + 1 - n for every training sequence of n payload symbols,
    so all rows are trained, and is 1 in evaluation. `max_len` is the longest run, and the longest
    sequence too, as it could be one: (max_len + 2) d_model parameters. It knows where the task's
    parts begin, and that they align. The place depends on all earlier tokens, so keys are not
    cached.
    """

    name = "pos_coupling"
    kv = False
    max_len: Any = None  # set by the constructor: not that of the inner scheme

    def __init__(self, site: Site, over: Maker, max_len: int = 1023) -> None:
        if max_len < 1:
            raise UserError(
                f"pos_coupling: max_len is {max_len}; it must be at least the longest payload, "
                "the paper has 300 on copy"
            )
        super().__init__(site, over, replace(site, train_len=max_len + 2, seen=max_len + 2))
        self._need_rows(max_len + 2)
        self._need_no_order()
        self.max_len = max_len

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        place = places(symbols)  # (B, T)
        longest = _longest("pos_coupling", place, self.max_len)
        start = torch.ones(len(symbols), 1, dtype=torch.long)  # (B, 1)
        if generator is not None:
            starts = self.max_len + 1 - longest
            start = torch.randint(1, starts + 1, start.shape, generator=generator)
        start = start.to(symbols.device)
        return torch.where(symbols, start + place, start * first_end(symbols))


def places(symbols: Tensor) -> Tensor:
    """The place of each symbol in its run of symbols, from 1; 0 for a special token.

    symbols: bool (B, T) -> (B, T).
    """
    count = torch.arange(1, symbols.shape[1] + 1, device=symbols.device)  # (T,)
    special = torch.where(symbols, 0, count).cummax(-1).values  # (B, T), the last one so far
    return count - special


def first_end(symbols: Tensor) -> Tensor:
    """Where the first run of symbols has just ended, which is SEP. bool (B, T) -> same."""
    before = torch.nn.functional.pad(symbols[:, :-1], (1, 0))  # (B, T), False before the first
    ends = ~symbols & before
    return ends & (ends.cumsum(-1) == 1)


def _longest(name: str, place: Tensor, max_len: int) -> int:
    """The symbols of the longest run.

    Raises:
        UserError: more than max_len.
    """
    longest = int(place.max())
    if longest > max_len:
        raise UserError(
            f"{name}: {longest} symbols in a row are beyond max_len {max_len}: train with "
            f"scheme.max_len={longest} or more"
        )
    return longest
