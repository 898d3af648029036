"""Rotary positions: queries and keys turn by an angle that grows with their position.

    q_i -> R(i) q_i,  k_j -> R(j) k_j,  (R(i) q)^T (R(j) k) = q^T R(j - i) k        hook: prepare

Each pair of dimensions turns at its own frequency. Variants are in rotary_variants.py, extensions
of a trained RoPE in scaling.py.
"""

from typing import Any

import torch
from torch import Tensor

from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Scheme, Site


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) of x = (a, b), two halves of F, in whole rows: few passes.

    x: (B, H, T, 2 F); cos, sin: (..., T, F) -> (B, H, T, 2 F)
    """
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)


class _Turn(torch.autograd.Function):
    """`turn` by fixed angles: its gradient is turned back, which spares autograd's pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first 2F dimensions of x by the given angles, in the precision of cos and sin.

    x: (B, H, T, D); cos, sin: (T, F), (B, T, F) or, with angles of every head, (1 or B, H, T, F)
    -> (B, H, T, D) in x's dtype. A pair is (2c, 2c + 1) when interleaved, else (c, c + F).
    """
    width = 2 * cos.shape[-1]
    if cos.ndim < 4:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (1, T, F) or (B, 1, T, F)
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, F)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        fixed = not (cos.requires_grad or sin.requires_grad)
        turned = (_Turn.apply if fixed and x.requires_grad else turn)(turned, cos, sin)
    turned = turned.to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def check_head(name: str, site: Site, base: float) -> None:
    """Refuse a head that has no pairs to turn, and frequencies that do not fall.

    Raises:
        UserError: an odd width, or a base of 1 or less.
    """
    if site.d_head % 2:
        raise UserError(
            f"{name}: d_head {site.d_head} is odd and cannot turn in pairs: use an even head width"
        )
    if base <= 1:
        raise UserError(f"{name}: base is {base}; it must be above 1, the paper has 10000")


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

    def refine(self, theta: Tensor) -> Tensor:
        """What a variant makes of frequencies, its own or an extension's. (F,) float64 -> (F,)"""
        return theta

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        theta = self.frequencies(pos.shape[-1])  # (F,)
        angle = pos.to(theta)[..., None] * theta  # (T, F)
        cos, sin = (turn * self.attention_factor for turn in (angle.cos(), angle.sin()))
        q, k = (rotate(part, cos, sin, self.interleaved) for part in (q, k))
        return q, k, v, None
