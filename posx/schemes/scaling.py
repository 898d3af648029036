"""Extensions of a trained RoPE: they change its frequencies and leave the weights.

    (trained scheme, evaluation length) -> changed copy

`train_len` L is that of the trained model; s, the factor, says how far an extension goes beyond it.
The rules that make frequencies are in frequencies.py. What a variant of RoPE does with its own
frequencies (`Rope.refine`), it does with these, too.
"""

import copy
import math

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Scheme, Site
from posx.schemes.rotary import Rope
from posx.schemes.rotary_variants import check_share


class DynamicRope(Rope):
    """RoPE whose base grows with the current length n beyond the training length L.

    base (s n / L - (s - 1))^(d / (d - 2)) with s the factor, d the rotated width: "dynamic NTK",
    emozilla 2023, in Peng et al. 2023 (arXiv:2309.00071). All keys turn anew when n grows, so
    turned keys cannot be cached and a prefix changes with what follows it.
    """

    length_dependent = True
    kv = False

    def __init__(self, trained: Rope, factor: float = 1.0) -> None:
        super().__init__(trained.site, trained.base, trained.rotary_dim, trained.interleaved)
        self.trained = copy.deepcopy(trained)
        self.factor = factor

    def refine(self, theta: Tensor) -> Tensor:
        return self.trained.refine(theta)

    def frequencies(self, n: int) -> Tensor:
        train_len = self.site.train_len
        theta = frequencies.dynamic(self.base, self.rotary_dim, self.factor, n, train_len)
        return self.refine(theta).to(self.inv_freq)


class Unturned(Scheme):
    """No positions, for a model that was trained with RoPE: the score is scale q k^T / sqrt(D).

    Gelberg et al. 2025 (arXiv:2512.12167): positions help training and hurt length, so DroPE drops
    them at its end (cos 1 and sin 0 in the authors' code) and trains on briefly. `scale` is their
    optional softmax_scale times sqrt(D); they can also normalise queries and keys, which is not
    here. No parameters, nothing limits the length.
    """

    enters = "mask"

    def __init__(self, site: Site, scale: float = 1.0) -> None:
        super().__init__(site)
        self.scale = scale

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q * self.scale, k, v, None


def pi(scheme: Rope, length: int, *, factor: float | None = None) -> Rope:
    """Position interpolation: all frequencies divided by the factor (None: length / train_len).

    Chen et al. 2023 (arXiv:2306.15595), who fine-tune afterwards. Without that it blurs the
    distance between neighbours, which hurts at the training length too.
    """
    factor = _factor("pi", scheme, length, factor)
    return _with_frequencies(scheme, frequencies.pi(scheme.base, scheme.rotary_dim, factor))


def ntk(scheme: Rope, length: int, *, factor: float | None = None) -> Rope:
    """NTK-aware scaling: a larger base, which divides the frequency of the slowest pair by the
    factor (None: length / train_len) and keeps that of the fastest.

    bloc97 2023; in Peng et al. 2023 (arXiv:2309.00071).
    """
    factor = _factor("ntk", scheme, length, factor)
    return _with_frequencies(scheme, frequencies.ntk(scheme.base, scheme.rotary_dim, factor))


def dynamic(scheme: Rope, length: int, *, factor: float = 1.0) -> Rope:
    """NTK-aware scaling by the length of the sequence itself: see `DynamicRope`.

    `length` is not used: up to the training length this is the trained scheme, beyond it every pass
    has its own base.
    """
    _check_factor("dynamic", factor)
    _check_fixed("dynamic", scheme)
    frequencies.ntk(scheme.base, scheme.rotary_dim, factor)  # refuses one pair now, not in the pass
    return DynamicRope(scheme, factor).to(scheme.inv_freq.device)


def ntk_parts(
    scheme: Rope,
    length: int,
    *,
    factor: float | None = None,
    beta_fast: float | None = 32.0,
    beta_slow: float = 1.0,
    ramp: str = "turns",
) -> Rope:
    """NTK by parts: slow pairs are stretched by the factor (None: length / train_len), fast ones
    stay. It is `yarn`, which explains the parameters, without the sharper scores.

    bloc97 2023; as Peng et al. 2023 (arXiv:2309.00071), 3.2, define it. The older code of the same
    name in their repository blends in a third, NTK-aware, set of frequencies. With beta_fast 4 it
    is the rule of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783), whose factor is 8.
    """
    return _by_parts("ntk_parts", scheme, length, factor, beta_fast, beta_slow, ramp)


def yarn(
    scheme: Rope,
    length: int,
    *,
    factor: float | None = None,
    beta_fast: float | None = 32.0,
    beta_slow: float = 1.0,
    ramp: str = "turns",
) -> Rope:
    """YaRN: slow pairs are stretched by the factor (None: length / train_len), fast ones stay, and
    scores grow by (0.1 ln factor + 1)^2.

    Peng et al. 2023 (arXiv:2309.00071). A pair is fast when it makes beta_fast turns in train_len
    tokens and slow when it makes beta_slow. The published 32 and 1 suit thousands of tokens: in 64
    tokens even the fastest pair makes 10 turns, so all are stretched. beta_fast null is train_len /
    16, which is 4 at 64 tokens. `ramp` is linear in turns, as the paper writes it, or in pairs
    rounded to whole ones, as its code does it (see posx/schemes/frequencies.py)."""
    changed = _by_parts("yarn", scheme, length, factor, beta_fast, beta_slow, ramp)
    changed.attention_factor = frequencies.yarn_attention_factor(
        _factor("yarn", scheme, length, factor)
    )
    return changed


def longrope(
    scheme: Rope, length: int, *, factor: float | None = None, factors: list[float] | None = None
) -> Rope:
    """LongRoPE: the frequency of pair c is divided by a number of its own, `factors`[c], and scores
    grow by 1 + ln factor / ln train_len (factor None: length / train_len).

    Ding et al. 2024 (arXiv:2402.13753). The paper searches the numbers for each large model by its
    loss on long texts. There are none for models this small: without a list they are those of
    `ntk`, factor^(2c / (d - 2)), which the formula allows, and nothing is searched. Up to train_len
    tokens this is the trained scheme; transformers sharpens the scores there, too. The first tokens
    of a sequence, which the paper may leave as they are, are scaled like all others, as in
    transformers.
    """
    factor = _factor("longrope", scheme, length, factor)
    train_len, dim = scheme.site.train_len, scheme.rotary_dim
    if factors is not None and (len(factors) != dim // 2 or min(factors) < 1):
        raise UserError(
            f"longrope: factors are {list(factors)}; there must be {dim // 2}, one a pair of the "
            "head, each at least 1"
        )
    if length <= train_len:
        return _with_frequencies(scheme, frequencies.rope(scheme.base, dim))
    if factors is None:
        theta = frequencies.ntk(scheme.base, dim, factor)
    else:
        theta = frequencies.rope(scheme.base, dim) / torch.tensor(factors, dtype=torch.float64)
    changed = _with_frequencies(scheme, theta)
    changed.attention_factor = math.sqrt(1 + math.log(factor) / math.log(train_len))
    return changed


def rope_clip(scheme: Rope, length: int, *, share: float = 0.3125, soft: bool = True) -> Rope:
    """Clipping: the slowest pairs turn less or not at all, at every length: see `ClippedRope`.

    Li et al. 2026 (arXiv:2602.05258), who train on with it.
    """
    check_share(share)
    theta = frequencies.rope(scheme.base, scheme.rotary_dim)
    return _with_frequencies(scheme, theta * frequencies.clip(len(theta), share, soft))


def drope0(scheme: Rope, length: int, *, scale: float = 1.0) -> Scheme:
    """No rotation any more, at every length: the trained model without positions, see `Unturned`.

    Gelberg et al. 2025 (arXiv:2512.12167): the first step of DroPE. The second, a short training
    that goes on without positions, is a run with init= a finished run of rope and
    extension=drope0.
    """
    if scale <= 0:
        raise UserError(f"drope0: scale is {scale}; it must be above 0, 1 changes nothing")
    return Unturned(scheme.site, scale)


def _by_parts(
    name: str,
    scheme: Rope,
    length: int,
    factor: float | None,
    beta_fast: float | None,
    beta_slow: float,
    ramp: str,
) -> Rope:
    """`ntk_parts` and `yarn` but for the temperature.

    Raises:
        UserError: the ramp's ends are in the wrong order, or it is of no known kind.
    """
    factor = _factor(name, scheme, length, factor)
    train_len = scheme.site.train_len
    fast = max(train_len / 16, beta_slow) if beta_fast is None else beta_fast
    if not 0 < beta_slow <= fast:
        raise UserError(
            f"{name}: beta_fast {fast} and beta_slow {beta_slow}; they count turns, fast ones more "
            "than slow ones: the paper has 32 and 1"
        )
    if ramp not in ("turns", "pairs"):
        raise UserError(f"{name}: ramp {ramp!r} is not known: use turns or pairs")
    theta = frequencies.yarn(
        scheme.base, scheme.rotary_dim, factor, train_len, fast, beta_slow, ramp
    )
    return _with_frequencies(scheme, theta)


def _factor(name: str, scheme: Rope, length: int, factor: float | None) -> float:
    """The factor, by default the one that fits `length` tokens into the trained range."""
    if factor is None:
        return max(1.0, length / scheme.site.train_len)
    _check_factor(name, factor)
    return factor


def _check_factor(name: str, factor: float) -> None:
    """Refuse to squeeze.

    Raises:
        UserError: a factor below 1.
    """
    if factor < 1:
        raise UserError(
            f"{name}: factor is {factor}; it must be at least 1, usual is eval length / train_len"
        )


def _with_frequencies(scheme: Rope, theta: Tensor) -> Rope:
    """A copy of the scheme with other frequencies and no temperature. theta: (F,), float64.

    Raises:
        UserError: the scheme does not keep its frequencies.
    """
    _check_fixed("the extension", scheme)
    changed = copy.deepcopy(scheme)
    changed.constant("inv_freq", changed.refine(theta))
    changed.to(scheme.inv_freq.device)
    changed.attention_factor = 1.0
    return changed


def _check_fixed(name: str, scheme: Rope) -> None:
    """Refuse a scheme that makes its frequencies anew in every pass.

    Raises:
        UserError: the frequencies follow the length.
    """
    if scheme.length_dependent:
        raise UserError(
            f"{name} cannot set the frequencies of {type(scheme).__name__}, which follow the "
            "length of the sequence: extend plain rope"
        )
