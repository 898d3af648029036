"""Variants of RoPE: other frequencies, learned ones, and rotations with something on top.

Those that are `Rope` with other frequencies can be extended like it, see scaling.py. The others
have a rule of their own that an extension would break, and are no `Rope`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Scheme, Site
from posx.schemes.rotary import Rope, check_head, rotate


class PRope(Rope):
    """RoPE in which only the fastest share p of the pairs turns: theta_c is 0 for c >= p d / 2.

    Barbero et al. 2024 (arXiv:2410.06205): p-RoPE, 0.75 their best; Gemma 4 has 0.25, under the
    name proportional. Exponents are over the whole width d, unlike those of rope with a smaller
    rotary_dim, so the turning pairs keep the frequencies of RoPE. What does not turn matches
    content alone, at any distance: the slow pairs that meet unseen angles beyond the training
    length are the ones left out. p = 1 is RoPE, p = 0 no position. No parameters.
    """

    def __init__(
        self, site: Site, base: float = 10000.0, p: float = 0.75, interleaved: bool = False
    ) -> None:
        check_head("p_rope", site, base)
        if not 0 <= p <= 1:
            raise UserError(f"p_rope: p is {p}; it must be a share from 0 to 1, the paper has 0.75")
        super().__init__(site, base, None, interleaved)
        self.p = p
        self.constant("inv_freq", self.refine(frequencies.rope(base, self.rotary_dim)))

    def refine(self, theta: Tensor) -> Tensor:
        return theta * frequencies.top(len(theta), self.p).to(theta)


class Hope(Rope):
    """RoPE without its slow pairs: one that makes no full turn in train_len tokens, theta_c below
    2 pi / train_len, does not turn. (unverified: the place of the cut, see below)

    Chen et al. 2024 (arXiv:2410.21216): HoPE, high-frequency rotary positions. Their abstract says
    that certain components become independent of position and that only high frequencies stay;
    that those below one full turn are the ones to go is our reading. All angles that occur beyond
    the training length were then seen in training. No parameters.
    """

    def __init__(self, site: Site, base: float = 10000.0, interleaved: bool = False) -> None:
        check_head("hope", site, base)
        super().__init__(site, base, None, interleaved)
        self.constant("inv_freq", self.refine(frequencies.rope(base, self.rotary_dim)))

    def refine(self, theta: Tensor) -> Tensor:
        # By the trained frequencies: an extension slows pairs that turned in training.
        kept = frequencies.full_turns(self.base, self.rotary_dim, self.site.train_len)
        return theta * kept.to(theta)


class ClippedRope(Rope):
    """RoPE whose slowest pairs turn less: theta_c (1 + cos u_c) / 2, u_c from 0 to pi over them.

    Li et al. 2026 (arXiv:2602.05258), there CoPE, for clipped RoPE. The slowest `share` of the
    pairs fades to no rotation at all (soft), or all of it stops at once (soft=false, their hard
    clip). The published code clips 20 of 64 pairs, which is the share here, whatever the base and
    the training length; of those the first keeps its frequency and the last stands still. Beyond
    the training length fewer pairs meet unseen angles. No parameters. It is an extension of a
    trained RoPE, too.
    """

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        share: float = 0.3125,
        soft: bool = True,
        interleaved: bool = False,
    ) -> None:
        check_head("rope_clip", site, base)
        check_share(share)
        super().__init__(site, base, None, interleaved)
        self.share, self.soft = share, soft
        self.constant("inv_freq", self.refine(frequencies.rope(base, self.rotary_dim)))

    def refine(self, theta: Tensor) -> Tensor:
        return theta * frequencies.clip(len(theta), self.share, self.soft).to(theta)


def check_share(share: float) -> None:
    """Refuse a share of pairs that is none.

    Raises:
        UserError: below 0 or above 1.
    """
    if not 0 <= share <= 1:
        raise UserError(
            f"rope_clip: share is {share}; it must be from 0 to 1, the published code clips 20 of "
            "64 pairs, 0.3125"
        )


class ResonanceRope(Rope):
    """RoPE with wavelengths of whole tokens: theta_c = 2 pi / round(2 pi / theta_c).

    Wang et al. 2024 (arXiv:2403.00071). A pair whose wavelength is below the training length then
    repeats itself exactly, so longer inputs bring no new angle to it; slower pairs meet unseen ones
    as in RoPE. An extension rounds after it stretches: with yarn it is the paper's Resonance YaRN.
    No parameters. The published code reads angles from a table of one wavelength; here they are
    products, equal up to float32 angles.
    """

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__(site, base, rotary_dim, interleaved)
        self.constant("inv_freq", self.refine(frequencies.rope(base, self.rotary_dim)))

    def refine(self, theta: Tensor) -> Tensor:
        return frequencies.resonance(theta)


class LearnedRope(Scheme):
    """RoPE with trained frequencies: theta_c = base^(-2c / d) exp(w_c), w from zero.

    The log-frequencies are the parameters, as in the non-contextual GRAPE-M of Zhang et al. 2025
    (arXiv:2512.07805); w_c is what training adds to them, so that half precision rounds the change
    and not the frequency. One set a layer, d_head / 2 parameters, or with per_head=true one a
    head. No longest length; slow pairs meet unseen angles as in RoPE.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        per_head: bool = False,
        interleaved: bool = False,
    ) -> None:
        super().__init__(site)
        check_head("rope_learned", site, base)
        self.interleaved = interleaved
        self.constant("inv_freq", frequencies.rope(base, site.d_head))  # (F,)
        self.weight = nn.Parameter(torch.zeros(site.n_heads if per_head else 1, site.d_head // 2))

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        theta = self.inv_freq * self.weight.to(self.inv_freq).exp()  # (1 or H, F)
        angle = pos.to(theta)[..., None, :, None] * theta[:, None]  # (1 or H, T, F), or (B, ...)
        angle = angle.view(-1, *angle.shape[-3:])  # (1 or B, 1 or H, T, F)
        q, k = (rotate(part, angle.cos(), angle.sin(), self.interleaved) for part in (q, k))
        return q, k, v, None


class Xpos(Scheme):
    """RoPE with a decay: q grows by zeta_c^(i / scale_base), k by zeta_c^(-j / scale_base), so the
    share of pair c in the score fades with distance, by zeta_c = (2c / d + gamma) / (1 + gamma).

    Sun et al. 2022 (arXiv:2212.10554). The fast pairs fade first. scale_base 512 was made for 1024
    tokens and more: at 64 tokens the fastest pair falls to 0.86. Positions count from zero; the
    published code centres them on the middle of each input, which leaves scores as they are, but
    turned keys in a cache would not fit later ones. Keys grow without bound: beyond scale_base * 80
    / ln(1 / zeta_0) tokens, 32 695 with the defaults, they would leave the range of float32, and
    max_len says so. No parameters.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor
    decay: Tensor

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        interleaved: bool = True,
    ) -> None:
        super().__init__(site)
        check_head("xpos", site, base)
        if scale_base <= 0 or gamma <= 0:
            raise UserError(
                f"xpos: scale_base {scale_base} and gamma {gamma}; both must be above 0, the paper "
                "has 512 and 0.4"
            )
        self.interleaved = interleaved
        c = torch.arange(0, site.d_head, 2, dtype=torch.float64)
        log_zeta = torch.log((c / site.d_head + gamma) / (1 + gamma))
        self.constant("inv_freq", frequencies.rope(base, site.d_head))  # (F,)
        self.constant("decay", log_zeta / scale_base)  # (F,)
        self.max_len = int(80 / -self._exact["decay"][0].item())  # e^88 is float32's end

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        place = pos.to(self.inv_freq)[..., None]  # (T, 1)
        angle, size = place * self.inv_freq, (place * self.decay).exp()  # (T, F)
        cos, sin = angle.cos(), angle.sin()
        q = rotate(q, cos * size, sin * size, self.interleaved)
        k = rotate(k, cos / size, sin / size, self.interleaved)
        return q, k, v, None


class Fope(Scheme):
    """RoPE in which every pair turns by a mix of frequencies: cos' = C^T cos(p theta), sin' = S^T
    sin(p theta), with frozen random C and S of every head.

    Hua et al. 2024 (arXiv:2412.17739): Fourier position embedding. Frequencies below 2 pi /
    train_len, which make no full turn in training, are left out. The rest, F of them, feed out =
    min(F, d_head / 4) pairs; C and S are a (stretched) identity plus Xavier noise of init_gain, 0.3
    to 0.6 in the paper's runs by size, drawn with the weights and kept in the state dict. The other
    pairs do not depend on position: cos' = 1 and sin' = padded_sin. The official code has 1 there,
    which turns them by 45 degrees and doubles their part of the score; 0 leaves them as they are.
    Not a rotation, so scores depend on more than the difference of positions. No trained
    parameters. Beyond the training length all frequencies have been seen.
    """

    enters = "q/k"
    inv_freq: Tensor
    cos_mix: Tensor
    sin_mix: Tensor

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        init_gain: float = 0.3,
        padded_sin: float = 1.0,
    ) -> None:
        super().__init__(site)
        check_head("fope", site, base)
        theta = frequencies.rope(base, site.d_head)
        theta = theta[frequencies.full_turns(base, site.d_head, site.train_len) > 0]
        out = min(len(theta), site.d_head // 4)
        if out == 0:
            raise UserError(
                f"fope: no frequency makes a full turn in train_len {site.train_len} tokens, or "
                f"d_head {site.d_head} is below 4: use a longer train_len and a wider head"
            )
        self.padded_sin = padded_sin
        self.constant("inv_freq", theta)  # (F,)
        step = math.ceil(len(theta) / out)
        eye = torch.zeros(len(theta), out)  # (F, out)
        for c in range(out):
            if c * step < len(theta):
                eye[c * step, c] = 1
        for name in ("cos_mix", "sin_mix"):
            noise = torch.empty(site.n_heads, len(theta), out)  # (H, F, out)
            self.register_buffer(name, eye + nn.init.xavier_normal_(noise, gain=init_gain))

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        angle = pos.to(self.inv_freq)[..., None, :, None] * self.inv_freq  # (1, T, F), (B, 1, T, F)
        rest = self.site.d_head // 2 - self.cos_mix.shape[-1]
        with torch.autocast(angle.device.type, enabled=False):  # which would lower the products
            cos = F.pad(angle.cos() @ self.cos_mix.to(angle), (0, rest), value=1.0)
            sin = F.pad(angle.sin() @ self.sin_mix.to(angle), (0, rest), value=self.padded_sin)
        cos, sin = (turn.view(-1, *turn.shape[-3:]) for turn in (cos, sin))  # (1 or B, H, T, D / 2)
        q, k = (rotate(part, cos, sin, interleaved=False) for part in (q, k))
        return q, k, v, None


class Pope(Scheme):
    """Content is the length of a phasor, position its angle: dimension c of the score is
    softplus(q_c) softplus(k_c) cos((i - j) theta_c - delta_c), theta_c = base^(-c / d).

    Gopalakrishnan et al. 2025 (arXiv:2509.10534): PoPE. Each dimension has a frequency and a
    trained phase delta of its own, clamped to [-2 pi, 0]; n_heads * d_head parameters a layer.
    Phases start at zero, or uniformly over the range with uniform=true. Queries and keys are two
    numbers a dimension, 2 d_head wide, and scores are divided by sqrt(d_head) all the same, as in
    x-transformers. No longest length; slow dimensions meet unseen angles as in RoPE.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor

    def __init__(self, site: Site, base: float = 10000.0, uniform: bool = False) -> None:
        super().__init__(site)
        if base <= 1:
            raise UserError(f"pope: base is {base}; it must be above 1, the paper has 10000")
        self.constant("inv_freq", frequencies.rope(base, 2 * site.d_head))  # (D,)
        self.delta = nn.Parameter(torch.zeros(site.n_heads, site.d_head))
        if uniform:
            nn.init.uniform_(self.delta, -2 * math.pi, 0.0)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        angle = pos.to(self.inv_freq)[..., None] * self.inv_freq  # (T, D)
        angle = angle.unsqueeze(-3)  # (1, T, D) or (B, 1, T, D)
        phase = self.delta.to(angle).clamp(-2 * math.pi, 0)[:, None]  # (H, 1, D)
        return self._phasors(q, angle), self._phasors(k, angle + phase), v, None

    @staticmethod
    def _phasors(x: Tensor, angle: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, T, 2 D)"""
        size = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))
        return torch.cat([size * angle.cos(), size * angle.sin()], -1).to(x.dtype)
