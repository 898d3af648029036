"""Temperatures: scores that grow with the number of visible keys, so that attention stays sharp.

    z_ij -> f(i) z_ij        hooks: prepare, which multiplies q_i; scores where a bias grows too

The softmax of n equal scores is 1 / n: the longer the input, the flatter the weights. A query at
position p sees n = p + 1 keys, those that a mask hides included. All of these schemes stand around
another one, which says where tokens are.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posx.errors import UserError
from posx.schemes.base import Maker, Scheme, Site
from posx.schemes.combine import Over, of_over


def visible(pos: Tensor, like: Tensor) -> Tensor:
    """Keys that the query at each position sees, in like's precision or float32.

    pos: (T,) or (B, T) -> (1, T) or (B, 1, T), the 1 for the heads.
    """
    return (pos + 1).to(torch.promote_types(like.dtype, torch.float32)).unsqueeze(-2)


def check_counts(name: str, over: Scheme) -> None:
    """Refuse positions that do not count tokens.

    Raises:
        UserError: the scheme gives positions of its own.
    """
    if over.overrides("positions"):
        raise UserError(
            f"{name}: it counts the visible keys by their positions, and {type(over).__name__} "
            "gives other positions: use scheme.over=rope or another scheme without them"
        )


class Temperature(Over):
    """The ground of the temperatures: z_ij -> f(n) z_ij over any scheme, n = i + 1 visible keys.

    With scale_bias false f multiplies q after the inner scheme's `prepare`, so all that is made
    with q grows and a bias does not. With scale_bias true the whole score grows, the bias too.
    """

    enters = "softmax"
    relative = False
    counts: ClassVar[bool] = True  # whether f depends on n

    def __init__(self, site: Site, over: Maker, scale_bias: bool = False) -> None:
        super().__init__(site, over)
        if self.counts:
            check_counts(type(self).__name__.lower(), self.over)
        self.scale_bias = scale_bias

    def factor(self, n: Tensor) -> Tensor:
        """f of n visible keys. n: (..., 1, T) -> (..., 1 or H, T)."""
        raise AssertionError("every temperature has its own factor")

    @property
    def _on_scores(self) -> bool:
        """Whether f multiplies the scores: there is a bias, and it grows too."""
        with_bias = self.over.overrides("scores") or self.over.overrides("distance_bias")
        return self.scale_bias and with_bias

    def overrides(self, hook: str) -> bool:
        if hook == "scores":
            return self._on_scores or self.over.overrides(hook)
        if hook in ("fold", "far"):  # which know the bias as it was
            return not self._on_scores and self.over.overrides(hook)
        return super().overrides(hook)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, state = self.over.prepare(x, q, k, v, pos, past)
        if not self._on_scores:
            q = (q * self.factor(visible(pos, q))[..., None]).to(q.dtype)
        return q, k, v, state

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        z = self.over.scores(z, q, k, i, j, state)
        return z * self.factor(visible(i, z))[..., None] if self._on_scores else z


class Logn(Temperature):
    """f(n) = ln n / ln L with L the training length; max(1, f) when clipped.

    Su 2021 (https://kexue.fm/archives/8823), Chiang & Cholak 2022 (arXiv:2202.12172). Clipped, the
    first L queries are as without it: the form for a trained model, as the extension logn has it.
    Unclipped it is part of training, and the first token's scores are 0. No parameters.
    """

    def __init__(
        self, site: Site, over: Maker, clipped: bool = True, scale_bias: bool = False
    ) -> None:
        super().__init__(site, over, scale_bias)
        self.clipped = clipped

    def factor(self, n: Tensor) -> Tensor:
        f = n.log() / math.log(max(2, self.site.train_len))
        return f.clamp(min=1) if self.clipped else f


class Ssmax(Temperature):
    """f(n) = s ln n with a trained s a head: "scalable softmax", n^(s z) in place of e^z.

    Nakanishi 2025 (arXiv:2501.19399), without its bias, which the paper finds to hurt beyond the
    training length. `init` null starts s at 1 / mean(ln n) over the training length, so that f is 1
    on average: 0.168 at 1024 tokens, as in the paper (the number from a second source), 0.31 at 64.
    Others start at 0.43 (the package scalable-softmax) or 1 (BAM). The first token's scores are 0.
    n_heads parameters a layer.
    """

    def __init__(
        self, site: Site, over: Maker, init: float | None = None, scale_bias: bool = False
    ) -> None:
        super().__init__(site, over, scale_bias)
        if init is None:
            n = max(2, site.train_len)
            init = n / math.lgamma(n + 1)  # ln 1 + ... + ln n = ln n!
        self.s = nn.Parameter(torch.full((site.n_heads,), init))

    def factor(self, n: Tensor) -> Tensor:
        return self.s.to(n)[:, None] * n.log()


class Llama4(Temperature):
    """f = 1 + attn_scale ln(1 + floor((i + offset) / floor_scale)), a staircase.

    Llama 4, Meta 2025 (https://ai.meta.com/blog/llama-4-multimodal-intelligence), where it acts in
    the layers without RoPE (see irope) with floor_scale 8192. `floor_scale` null is the training
    length, so that f is 1 up to its last token. Ministral 3 counts from offset 0. No parameters.
    """

    def __init__(
        self,
        site: Site,
        over: Maker,
        floor_scale: int | None = None,
        attn_scale: float = 0.1,
        offset: int = 1,
        scale_bias: bool = False,
    ) -> None:
        super().__init__(site, over, scale_bias)
        if floor_scale is not None and floor_scale < 1:
            raise UserError(
                f"llama4: floor_scale is {floor_scale}; it must be at least 1 token, or null for "
                "the training length"
            )
        if offset not in (0, 1):
            raise UserError(f"llama4: offset is {offset}; use 1 as Llama 4 does, or 0")
        self.floor_scale = site.train_len if floor_scale is None else floor_scale
        self.attn_scale = attn_scale
        self.offset = offset

    def factor(self, n: Tensor) -> Tensor:
        steps = ((n - 1 + self.offset) / self.floor_scale).floor()
        return 1 + self.attn_scale * steps.log1p()


class HeadScale(Temperature):
    """f = a trained number a head, whatever the position: 1 / sqrt(D) becomes f_h / sqrt(D).

    Wang et al. 2024 (arXiv:2404.12224), for NoPE, where f alone is tuned on longer inputs after
    training; here it is trained with the rest, or alone by continuing a run. Starts at 1.
    n_heads parameters a layer.
    """

    counts = False
    relative = of_over("relative")

    def __init__(self, site: Site, over: Maker, scale_bias: bool = False) -> None:
        super().__init__(site, over, scale_bias)
        self.scale = nn.Parameter(torch.ones(site.n_heads))

    def factor(self, n: Tensor) -> Tensor:
        return self.scale.to(n)[:, None]


class AdaptiveScale(Over):
    """f_i = delta + b_i ln(n + 1)^g_i, with b_i = softplus(w_b x_i) and g_i = r tanh(w_g x_i), each
    a head's, so that a query chooses how sharp it gets with length.

    Vasylenko et al. 2025 (arXiv:2506.16640), for the NoPE heads of ASEntmax (see asentmax). The
    paper writes ln n; its code has ln(n + 1), as ln 1 = 0 has no negative power, and gates with a
    bias, r = `gamma_range` = 2 and delta = 1. q grows, a bias does not.
    2 (d_model + 1) n_heads parameters a layer.
    """

    enters = "softmax"
    relative = False

    def __init__(
        self, site: Site, over: Maker, delta: float = 1.0, gamma_range: float = 2.0
    ) -> None:
        super().__init__(site, over)
        check_counts("adaptive_scale", self.over)
        self.delta, self.gamma_range = delta, gamma_range
        self.beta, self.gamma = (nn.Linear(site.d_model, site.n_heads) for _ in range(2))
        for gate in (self.beta, self.gamma):
            nn.init.normal_(gate.weight, std=0.02)
            nn.init.zeros_(gate.bias)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, state = self.over.prepare(x, q, k, v, pos, past)
        log_n = (visible(pos, q) + 1).log()  # (1, T)
        beta, gamma = (gate(x).to(log_n).transpose(1, 2) for gate in (self.beta, self.gamma))
        factor = self.delta + F.softplus(beta) * log_n ** (self.gamma_range * gamma.tanh())
        return (q * factor[..., None]).to(q.dtype), k, v, state  # factor: (B, H, T)


class Sia(Over):
    """z_ij -> a z_ij - 2 u with u = ln(1 + (i - j) / tau), a = sqrt(1 + 2 u): far scores spread
    more and are lower on average, so that every decade of distances gets a like share.

    Anson et al. 2025 (arXiv:2505.17083), which needs RoPE without its slow pairs inside and scores
    of about unit variance. The whole score of the inner scheme is transformed, its bias too.
    a = 1 and u = 0 at the query's own key. No parameters.
    """

    enters = "softmax"

    def __init__(self, site: Site, over: Maker, tau: float = 10.0) -> None:
        super().__init__(site, over)
        if tau <= 0:
            raise UserError(f"sia: tau is {tau}; it must be above 0 tokens, the paper has 10")
        self.tau = tau

    def overrides(self, hook: str) -> bool:
        """No shortcut of the inner scheme: they know no a and u."""
        return hook not in ("fold", "far") and super().overrides(hook)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        z = self.over.scores(z, q, k, i, j, state)
        wide = torch.promote_types(z.dtype, torch.float32)
        distance = i.to(wide)[..., None, :, None] - j.to(wide)[..., None, None, :]  # (1, T, S)
        u = distance.div_(self.tau).clamp_(min=0).log1p_()
        return z * (1 + 2 * u).sqrt() - 2 * u


class _Entmax15(torch.autograd.Function):
    """p = max(0, z / 2 - t)^2 with the t that makes the weights of a row sum to 1."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        # In place, as blocks are large. t lies in [-1, 0) once the largest is 0: what lies lower,
        # masked keys too, has no weight.
        half = z / 2
        half.sub_(half.amax(-1, keepdim=True)).clamp_(min=-1)
        root = half.sub_(_threshold(half)).clamp_(min=0)  # sqrt(p)
        # A Newton step on sum(root^2) = 1 takes away the rounding of the cumulated sums.
        kept = root > 0
        excess = root.square().sum(-1, keepdim=True) - 1
        root.sub_(excess / (2 * root.sum(-1, keepdim=True))).clamp_(min=0).mul_(kept)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """dp_j / dz_k = r_j (1[j = k] - r_k / sum(r)) with r = sqrt(p)."""
        (root,) = ctx.saved_tensors
        weighted = grads[0] * root
        share = weighted.sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
        return weighted - root * share


def _threshold(half: Tensor, first: int = 256) -> Tensor:
    """t of each row, from its largest values: if exactly the c largest are above t, then
    t = mean - sqrt((1 - c var) / c) of those. half: (..., S), largest 0 -> (..., 1).

    Few keys have weight in a trained model, so a sorted part of the row is tried first and grows
    until it holds all of them.
    """
    size = min(first, half.shape[-1])
    while True:
        largest = half.topk(size, -1).values  # (..., size), falling
        count = torch.arange(1, size + 1, device=half.device, dtype=half.dtype)
        mean = largest.cumsum(-1).div_(count)
        spread = largest.square().cumsum(-1).sub_(mean.square().mul_(count))  # c var
        t = mean.sub_(spread.neg_().add_(1).div_(count).clamp_(min=0).sqrt_())
        held = (t < largest).sum(-1, keepdim=True)  # the largest is always held
        if size == half.shape[-1] or bool((held < size).all()):
            return t.gather(-1, held - 1)
        size = min(4 * size, half.shape[-1])


def entmax15(z: Tensor) -> Tensor:
    """Scores to weights that are exactly 0 for low scores; -inf is 0. (..., S) -> same."""
    return _Entmax15.apply(z)


class Entmax(Over):
    """Entmax in place of the softmax: p_ij = max(0, z_ij / 2 - t_i)^2, t_i so that a row sums to 1.

    Peters et al. 2019 (arXiv:1905.05702), alpha = 1.5, solved exactly by sorting. Low scores get no
    weight at all, so that more keys need not flatten the rest. ASEntmax, Vasylenko et al. 2025
    (arXiv:2506.16640), is this over nape with its NoPE heads under AdaptiveScale. No parameters.
    """

    enters = "softmax"

    def __init__(self, site: Site, over: Maker) -> None:
        super().__init__(site, over)
        check_softmax("entmax", self.over)

    def normalize(self, z: Tensor) -> Tensor:
        return entmax15(z.to(torch.promote_types(z.dtype, torch.float32)))


def check_softmax(name: str, over: Scheme) -> None:
    """Refuse a second change of the softmax.

    Raises:
        UserError: the scheme has changed it.
    """
    if over.overrides("normalize"):
        raise UserError(
            f"{name}: it changes the softmax, which {type(over).__name__} has changed already: use "
            "one of the two"
        )


# -- extensions ----------------------------------------------------------------------------------


# 1 / temperature as a polynomial of the entropy, highest power first
ADATEMP = (-0.037, 0.481, -2.3, 4.917, -1.791)


class Adatemp(Over):
    """What the extension adatemp puts around a scheme (arXiv:2410.01104)."""

    enters = "softmax"

    def __init__(self, site: Site, over: Maker, threshold: float = 0.5) -> None:
        super().__init__(site, over)
        self.threshold = threshold

    def normalize(self, z: Tensor) -> Tensor:
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        with torch.no_grad():  # backward, a hidden key's 0 times -inf would be no number
            entropy = torch.special.entr(self.over.normalize(z)).sum(-1, keepdim=True)
            beta = torch.zeros_like(entropy)  # (B, H, T, 1)
            for coefficient in ADATEMP:
                beta = beta * entropy + coefficient
            sharper = torch.where(entropy > self.threshold, beta.clamp(min=1), 1)
        return self.over.normalize(z * sharper)


def adatemp(scheme: Scheme, length: int, *, threshold: float = 0.5) -> Scheme:
    """Multiply the scores of a row by a polynomial of the entropy of its weights, at least 1, where
    that entropy is above the threshold (in nats).

    Velickovic et al. 2024 (arXiv:2410.01104). The polynomial was fitted on short inputs: it is
    above 1 from 0.85 to 5.94 nats, so rows that are flatter than 380 equal keys are left as they
    are. Its coefficients go from the highest power down; one public copy, in the code of
    ASEntmax, reads them upwards. Where training goes on, the gradient takes the factor as given.
    `length` is not used.
    """
    return _around(scheme, lambda inner: Adatemp(scheme.site, inner, threshold))


def logn(scheme: Scheme, length: int, *, scale_bias: bool = False) -> Scheme:
    """Multiply the scores of the query that sees n keys by max(1, ln n / ln train_len): see `Logn`.

    Su 2021 (https://kexue.fm/archives/8823), Chiang & Cholak 2022 (arXiv:2202.12172). With
    scale_bias false q k^T alone grows, else the scheme's bias too. `length` is not used.
    """
    return _around(scheme, lambda inner: Logn(scheme.site, inner, scale_bias=scale_bias))


def _around(scheme: Scheme, make: Callable[[Maker], Scheme]) -> Scheme:
    """A scheme built around a copy of another one, on its device."""
    inner = copy.deepcopy(scheme)
    return make(lambda site: inner)
