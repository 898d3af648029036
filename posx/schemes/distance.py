"""Extensions of a trained RoPE or ALiBi that read it at other distances and leave the weights.

    z_ij -> q_i^T R(D'(i, j)) k_j / sqrt(D)        hooks: scores; mask where keys are hidden, too

RoPE's score depends on the distance D = i - j alone, so a far key can be scored as if it stood
where training has met it. Each map D' has two or three pieces, each a difference between a number
of the query and one of the key, so a block turns its queries and keys once a piece: O(S D) more
than plain scores, and nothing of size T x S x D. Keys are cached as they are, not turned.

L is the training length, site.train_len. The published constants are for thousands of tokens; here
they are fractions of L, which the yaml files give. None of the maps needs training, all are for
evaluation.
"""

import copy
import math

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes.base import HOOKS, Scheme
from posx.schemes.bias import Alibi
from posx.schemes.relative import distances
from posx.schemes.rotary import Rope, rotate
from posx.schemes.temperature import Logn

# Where a piece of a map holds, and the positions between which it takes the distance:
# bool (1, T, S) or (B, 1, T, S), query (T,) or (B, T), key (S,) or (B, S).
Piece = tuple[Tensor, Tensor, Tensor]


class Mapped(Scheme):
    """The ground of the maps: a trained scheme, but for `pieces` of other distances."""

    trained: Rope | Alibi

    def __init__(self, trained: Rope | Alibi) -> None:
        super().__init__(trained.site)
        self.trained = copy.deepcopy(trained)
        self.enters = trained.enters
        self.shared = trained.shared

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        """Where D' is not D. i: (T,), j: (S,)."""
        raise AssertionError("every map has its own pieces")

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        # Near keys alone keep D: counted from the last query, they turn by small angles, which
        # float32 holds best.
        last = i[..., -1:]
        out = self._between(z, q, k, i - last, j - last)
        for where, query, key in self.pieces(i, j):
            out = torch.where(where, self._between(z, q, k, query, key), out)
        return out

    def _between(self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The scores of the trained scheme at any positions. z, q, k: without positions."""
        if isinstance(self.trained, Alibi):
            distance = distances(i, j).squeeze(-3)  # (T, S) or (B, T, S)
            bias = self.trained.distance_bias(distance)  # (H, T, S) or (H, B, T, S)
            return z + (bias if bias.ndim == 3 else bias.transpose(0, 1))
        q, k = (turned(self.trained, part, pos) for part, pos in ((q, i), (k, j)))
        return (q * self.site.d_head**-0.5) @ k.transpose(-1, -2)


def turned(rope: Rope, x: Tensor, pos: Tensor) -> Tensor:
    """x as the trained scheme turns it at given positions. x: (B, H, T, D), pos: (T,) -> same."""
    angle = pos.to(rope.inv_freq)[..., None] * rope.inv_freq  # (T, F)
    cos, sin = (turn * rope.attention_factor for turn in (angle.cos(), angle.sin()))
    return rotate(x, cos, sin, rope.interleaved)


class LeakyReRope(Mapped):
    """D' = D below the window w, then w + (D - w) / k; k = inf holds it at w.

    Su 2023 (https://kexue.fm/archives/9708): ReRoPE, with k = inf, and Leaky ReRoPE. Near keys keep
    their order, far ones stand at w together, or move away from there slowly. With ReRoPE no
    distance above w occurs at any length; with k, none above L up to w + k (L - w) tokens. Both
    change the scores within the training length, too. No parameters.
    """

    relative = True

    def __init__(self, trained: Rope, window: int, factor: float = math.inf) -> None:
        super().__init__(trained)
        self.window, self.factor = window, factor

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        query = self.window + (i - self.window) / self.factor
        return [(distances(i, j) >= self.window, query, j / self.factor)]


class SelfExtend(Mapped):
    """D' = D below the window w, then floor(i / G) - floor(j / G) + w - w / G.

    Jin et al. 2024 (arXiv:2401.01325). Far tokens share a position with the others of their group
    of G, and the shift joins both pieces. No distance is new up to about w + G (L - w) tokens. The
    shift is rounded down in the paper, floor(w / G); its code does so in decoding only and has the
    exact w / G for whole inputs: `exact`. Its option to scale queries is not here, see logn.
    No parameters.
    """

    def __init__(self, trained: Rope, window: int, group: int, exact: bool = False) -> None:
        super().__init__(trained)
        self.window, self.group = window, group
        self.shift = window - (window / group if exact else window // group)

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        query = i.div(self.group, rounding_mode="floor") + self.shift
        return [(distances(i, j) >= self.window, query, j.div(self.group, rounding_mode="floor"))]


class DualChunk(Mapped):
    """D' = p - (j mod s): p = i mod s for a key of the query's own chunk of s tokens, min(i mod s +
    s, c) for one of the chunk before, c for older ones.

    Dual chunk attention, An et al. 2024 (arXiv:2402.17463). Up to c + 1 tokens, and across the
    border of two chunks for the first c - s + 1 tokens of each, D' is D. No distance above c occurs
    at any length, but far keys are told apart by their place in a chunk alone. No parameters.
    """

    def __init__(self, trained: Rope, chunk: int, limit: int) -> None:
        super().__init__(trained)
        self.chunk, self.limit = chunk, limit

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        number = (pos.div(self.chunk, rounding_mode="floor") for pos in (i, j))
        chunks = distances(*number)  # from the query's chunk back to the key's
        query, key = i % self.chunk, j % self.chunk
        before = (query + self.chunk).clamp(max=self.limit)
        return [
            (chunks == 1, before, key),
            (chunks > 1, torch.full_like(query, self.limit), key),
        ]


class ShiftedRope(Mapped):
    """D' = D below the shift S, then D - S + W.

    STRING, An et al. 2024 (arXiv:2410.18745). The distances that training has met least are those
    near L; far keys take smaller ones in their place, while the W nearest keep theirs alone. Meant
    for the training length itself: above L + S - W tokens distances are new all the same. In whole
    inputs the published code counts a key at D = S twice, with both distances; in decoding it has
    this map. No parameters.
    """

    relative = True

    def __init__(self, trained: Rope, shift: int, local: int) -> None:
        super().__init__(trained)
        self.shift, self.local = shift, local

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        return [(distances(i, j) >= self.shift, i - self.shift + self.local, j)]


class Sinks(Mapped):
    """The ground of those that see the first `sinks` and the last `window` tokens alone."""

    def __init__(self, trained: Rope | Alibi, sinks: int, window: int) -> None:
        super().__init__(trained)
        self.sinks, self.window = sinks, window
        self.band = (sinks, window)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if (pos.diff() < 1).any():  # the band skips keys by their number
            raise UserError(
                f"{type(self).__name__} counts tokens by their positions, and those here are no "
                "whole numbers that rise: extend a scheme that keeps positions, such as rope"
            )
        return q, k, v, None

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        first = (j < self.sinks)[..., None, None, :]  # (1, 1, S) or (B, 1, 1, S)
        return (distances(i, j) < self.window) | first


class LmInfinite(Sinks):
    """D' = min(D, W) over a mask in the shape of a Lambda: the last W tokens and the first ones.

    LM-Infinite, Han et al. 2023 (arXiv:2308.16137). W is the training length, so no distance above
    it occurs at any length, in O(n W) time; the first tokens stay in sight because trained models
    rest much of their weight there. Its code for ALiBi stops at W - 1, the one for RoPE at W; here
    both do as the paper says. No parameters.
    """

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        return [
            (distances(i, j) >= self.window, torch.full_like(i, self.window), torch.zeros_like(j))
        ]


class SinkWindow(Sinks):
    """The first S and the last W tokens, at their places in a cache that holds just them: D' = D
    for the last ones, min(i, S + W - 1) - j for the first ones.

    StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453). Without those places, by their distance in
    the text, it is another method. S + W is the training length, so no distance is new at any
    length, in O(n (S + W)) time. No parameters.
    """

    def pieces(self, i: Tensor, j: Tensor) -> list[Piece]:
        return [(distances(i, j) >= self.window, i.clamp(max=self.sinks + self.window - 1), j)]


# -- the extensions ------------------------------------------------------------------------------


def rerope(scheme: Rope, length: int, *, window: int | None = None, logn: bool = False) -> Scheme:
    """Keys from `window` tokens on (None: train_len / 4) stand at that distance: see `LeakyReRope`.

    Su 2023 (https://kexue.fm/archives/9708). 1024 of 4096 tokens in the author's published results,
    512 in his code, which also scales the queries by max(1, ln n / ln train_len): `logn`. `length`
    is not used.
    """
    return leaky_rerope(scheme, length, window=window, factor=math.inf, logn=logn)


def leaky_rerope(
    scheme: Rope,
    length: int,
    *,
    window: int | None = None,
    factor: float | None = None,
    logn: bool = False,
) -> Scheme:
    """Distances beyond `window` (None: train_len / 4) grow `factor` times more slowly, see
    `LeakyReRope`. factor None is the one that brings `length` tokens into the training length.

    Su 2023 (https://kexue.fm/archives/9708). 512 of 4096 tokens and 16 in his code, which also
    scales the queries: `logn`, see `rerope`.
    """
    name = "rerope" if factor == math.inf else "leaky_rerope"
    _check_rule(name, scheme)
    near_keys = _window(name, scheme, window)
    stretch = _stretch(scheme, length, near_keys) if factor is None else factor
    if stretch < 1:
        raise UserError(
            f"leaky_rerope: factor is {stretch}; it must be at least 1, the published code has 16"
        )
    mapped = LeakyReRope(scheme, near_keys, stretch)
    return Logn(scheme.site, lambda site: mapped) if logn else mapped


def self_extend(
    scheme: Rope,
    length: int,
    *,
    window: int | None = None,
    group: int | None = None,
    exact: bool = False,
) -> SelfExtend:
    """Tokens farther than `window` (None: train_len / 4) share positions in groups of `group`
    (None: the smallest that brings `length` tokens into the training length): see `SelfExtend`.

    Jin et al. 2024 (arXiv:2401.01325). 1024 of 4096 tokens and groups of 8 in its code; the
    smallest group that suffices is what its authors advise to try first.
    """
    _check_rule("self_extend", scheme)
    near_keys = _window("self_extend", scheme, window)
    size = math.ceil(_stretch(scheme, length, near_keys)) if group is None else group
    if size < 1:
        raise UserError(
            f"self_extend: group is {size}; it must be at least 1, the published code has 8"
        )
    return SelfExtend(scheme, near_keys, size, exact)


def dca(
    scheme: Rope,
    length: int,
    *,
    chunk: int | None = None,
    limit: int | None = None,
    sharpen: bool = False,
) -> DualChunk:
    """Distances inside chunks and between them, none above `limit` (None: train_len - 1): see
    `DualChunk`. chunk None is 3/4 train_len.

    An et al. 2024 (arXiv:2402.17463). Its code has chunks of 5/8 train_len (11/16 in some files)
    and a limit of 3/4, and multiplies cos and sin by 0.05 ln(length / train_len) + 1, which the
    paper's results are without: `sharpen`.
    """
    _check_rule("dca", scheme)
    train_len = scheme.site.train_len
    size = max(1, 3 * train_len // 4) if chunk is None else chunk
    most = max(1, train_len - 1) if limit is None else limit
    if not 0 < size <= most + 1:
        raise UserError(
            f"dca: chunk is {size} and limit {most}; a chunk has at least 1 token and at most "
            "limit + 1, usual are 3/4 of train_len and train_len - 1"
        )
    sharper = copy.deepcopy(scheme)
    if sharpen:
        sharper.attention_factor *= 0.05 * math.log(max(1.0, length / train_len)) + 1
    return DualChunk(sharper, size, most)


def string(
    scheme: Rope, length: int, *, shift: int | None = None, local: int | None = None
) -> ShiftedRope:
    """Distances from `shift` on (None: train_len / 3) start again at `local` (None: train_len /
    16): see `ShiftedRope`.

    An et al. 2024 (arXiv:2410.18745), 128 local tokens at 128 thousand there, which would be none
    here. `length` is not used.
    """
    _check_rule("string", scheme)
    train_len = scheme.site.train_len
    start = max(1, train_len // 3) if shift is None else shift
    kept = min(start, max(1, train_len // 16)) if local is None else local
    if not 0 < kept <= start:
        raise UserError(
            f"string: shift is {start} and local {kept}; local must be at least 1 and at most "
            "shift, usual are train_len / 16 and train_len / 3"
        )
    return ShiftedRope(scheme, start, kept)


def lm_infinite(
    scheme: Rope | Alibi, length: int, *, sinks: int = 10, window: int | None = None
) -> LmInfinite:
    """Only the first `sinks` and the last `window` tokens (None: train_len), those at most at
    distance `window`: see `LmInfinite`.

    Han et al. 2023 (arXiv:2308.16137), 10 to 100 first tokens there. `length` is not used.
    """
    _check_rule("lm_infinite", scheme)
    last = scheme.site.train_len if window is None else window
    if sinks < 0 or last < 1:
        raise UserError(
            f"lm_infinite: sinks is {sinks} and window {last}; they must be at least 0 and 1, "
            "usual are 10 and train_len"
        )
    return LmInfinite(scheme, sinks, last)


def sink_window(
    scheme: Rope | Alibi, length: int, *, sinks: int = 4, window: int | None = None
) -> SinkWindow:
    """Only the first `sinks` and the last `window` tokens (None: train_len - sinks), as if nothing
    lay between them: see `SinkWindow`.

    Xiao et al. 2023 (arXiv:2309.17453). `length` is not used.
    """
    _check_rule("sink_window", scheme)
    last = max(1, scheme.site.train_len - sinks) if window is None else window
    if sinks < 0 or last < 1:
        raise UserError(
            f"sink_window: sinks is {sinks} and window {last}; they must be at least 0 and 1, "
            "usual are 4 and train_len - sinks"
        )
    return SinkWindow(scheme, sinks, last)


def _check_rule(name: str, scheme: Rope | Alibi) -> None:
    """Refuse a variant that does more than turn by fixed frequencies, or add a slope.

    Raises:
        UserError: it overrides a hook of RoPE or ALiBi, or makes its frequencies in every pass.
    """
    plain, rules = (Rope, {*HOOKS, "frequencies"}) if isinstance(scheme, Rope) else (Alibi, HOOKS)
    if any(getattr(type(scheme), rule) is not getattr(plain, rule) for rule in rules):
        raise UserError(
            f"{name} reads plain rope or alibi at other distances, and {type(scheme).__name__} has "
            f"a rule of its own: train {plain.__name__.lower()}"
        )


def _window(name: str, scheme: Rope, window: int | None) -> int:
    """The tokens that keep their distance, a quarter of the training length by default.

    Raises:
        UserError: none, or more than training has met.
    """
    train_len = scheme.site.train_len
    width = max(1, train_len // 4) if window is None else window
    if not 0 < width < train_len:
        raise UserError(
            f"{name}: window is {width}; it must be at least 1 and below train_len {train_len}, "
            "usual is a quarter of it"
        )
    return width


def _stretch(scheme: Rope, length: int, window: int) -> float:
    """How much more slowly distances beyond the window must grow to stay below train_len."""
    return max(1.0, (length - window) / (scheme.site.train_len - window))
