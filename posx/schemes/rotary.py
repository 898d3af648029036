"""Rotary positions: queries and keys turn by an angle that grows with their position.

    q_i -> R(i) q_i,  k_j -> R(j) k_j,  (R(i) q)^T (R(j) k) = q^T R(j - i) k        hook: prepare

Each pair of dimensions turns at its own frequency. The extensions of a trained RoPE stand at the
end: they change the frequencies and leave the weights.
"""

import copy

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Scheme, Site


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first 2F dimensions of x by the given angles, in the precision of cos and sin.

    x: (B, H, T, D); cos, sin: (T, F) or (B, T, F) -> (B, H, T, D) in x's dtype. A pair is
    (2c, 2c + 1) when interleaved, else (c, c + F).
    """
    width = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (1, T, F) or (B, 1, T, F)
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, F)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)  # (B, H, T, F)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    turned = turned.to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class Rope(Scheme):
    """R(p) turns pair c by the angle p base^(-2c / rotary_dim).

    Su et al. 2021 (arXiv:2104.09864). `rotary_dim` of the d_head dimensions turn (None: all),
    paired as (c, c + rotary_dim / 2), or as (2c, 2c + 1) with interleaved=true; the two differ by a
    fixed order of the dimensions. No longest length; beyond the training length the slow pairs
    reach relative angles that the model has never seen. No parameters. Angles are float32 whatever
    the model's precision: off by 1e-3 rad at 32768 tokens, where bfloat16 would lose whole turns.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__(site)
        width = site.d_head if rotary_dim is None else rotary_dim
        if base <= 1:
            raise UserError(f"rope: base is {base}; it must be above 1, the paper has 10000")
        if width > site.d_head:
            raise UserError(
                f"rope: rotary_dim {width} is wider than the head, d_head {site.d_head}: use "
                "scheme.rotary_dim=null for all of it"
            )
        if width < 2 or width % 2:
            raise UserError(
                f"rope: rotary_dim {width} cannot turn in pairs (d_head {site.d_head}): use an "
                f"even scheme.rotary_dim such as {max(2, width - 1)}, or an even head width"
            )
        self.base = base
        self.rotary_dim = width
        self.interleaved = interleaved
        self.attention_factor = 1.0  # multiplies cos and sin, so scores by its square
        self.constant("inv_freq", frequencies.rope(base, width))  # (F,)

    def frequencies(self, n: int) -> Tensor:
        """The angle a token of every pair -> (F,), float32 or more.

        n: tokens of this pass, which are all tokens so far unless keys are cached.
        """
        return self.inv_freq

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        theta = self.frequencies(pos.shape[-1])  # (F,)
        angle = pos.to(theta)[..., None] * theta  # (T, F)
        cos, sin = (turn * self.attention_factor for turn in (angle.cos(), angle.sin()))
        q, k = (rotate(part, cos, sin, self.interleaved) for part in (q, k))
        return q, k, v, None


class DynamicRope(Rope):
    """RoPE whose base grows with the current length n beyond the training length L.

    base (s n / L - (s - 1))^(d / (d - 2)) with s the factor, d the rotated width: "dynamic NTK",
    emozilla 2023, in Peng et al. 2023 (arXiv:2309.00071). All keys turn anew when n grows, so
    turned keys cannot be cached and a prefix changes with what follows it.
    """

    length_dependent = True
    kv = False

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__(site, base, rotary_dim, interleaved)
        self.factor = factor

    def frequencies(self, n: int) -> Tensor:
        train_len = self.site.train_len
        theta = frequencies.dynamic(self.base, self.rotary_dim, self.factor, n, train_len)
        return theta.to(self.inv_freq)


# -- extensions: (trained scheme, evaluation length) -> changed copy ------------------------------


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
    if type(scheme) is not Rope:
        raise UserError(
            f"dynamic: the scheme is {type(scheme).__name__}, which has its own rule for the "
            "angles: extend plain rope"
        )
    frequencies.ntk(scheme.base, scheme.rotary_dim, factor)  # refuses one pair now, not in the pass
    return DynamicRope(scheme.site, scheme.base, scheme.rotary_dim, scheme.interleaved, factor).to(
        scheme.inv_freq.device
    )


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
    factor = _factor("yarn", scheme, length, factor)
    train_len = scheme.site.train_len
    fast = max(train_len / 16, beta_slow) if beta_fast is None else beta_fast
    if not 0 < beta_slow <= fast:
        raise UserError(
            f"yarn: beta_fast {fast} and beta_slow {beta_slow}; they count turns, fast ones more "
            "than slow ones: the paper has 32 and 1"
        )
    if ramp not in ("turns", "pairs"):
        raise UserError(f"yarn: ramp {ramp!r} is not known: use turns or pairs")
    theta = frequencies.yarn(
        scheme.base, scheme.rotary_dim, factor, train_len, fast, beta_slow, ramp
    )
    changed = _with_frequencies(scheme, theta)
    changed.attention_factor = frequencies.yarn_attention_factor(factor)
    return changed


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


def _with_frequencies(scheme: Rope, inv_freq: Tensor) -> Rope:
    """A copy of the scheme with other frequencies and no temperature. inv_freq: (F,).

    Raises:
        UserError: the scheme does not keep its frequencies.
    """
    if scheme.length_dependent:
        raise UserError(
            f"the frequencies of {type(scheme).__name__} follow the length of the sequence and "
            "cannot be set: extend plain rope"
        )
    changed = copy.deepcopy(scheme)
    changed.constant("inv_freq", inv_freq)
    changed.to(scheme.inv_freq.device)
    changed.attention_factor = 1.0
    return changed
