"""Score biases: a number that depends on the head and the distance, added before the softmax.

    z_ij + b_h(i - j)        hook: distance_bias; scores where it depends on i, too

On long inputs attention reads the bias as views of one vector a head, so no T x S table is built.
Biases that mix heads and content are in dape.py. The extension of ALiBi stands at the end.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.absolute import sinusoids
from posx.schemes.base import Scheme, Site
from posx.schemes.relative import distances, spread


def over_heads(values: Tensor, d: Tensor) -> Tensor:
    """One number a head, to be combined with d: (H,) -> (H, 1, ...), in float32 or more."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.to(wide).view(-1, *[1] * d.ndim)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8h / H) for h = 1 .. H.

    When H is no power of two: the slopes of the power below it, then every other slope of the
    power above, in the authors' order.
    """
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    between = [2 ** (-8 * h / (2 * below)) for h in range(1, 2 * below, 2)]
    return slopes + between[: n_heads - below]


class Alibi(Scheme):
    """b_h(d) = -m_h d with fixed slopes m_h = 2^(-8h / H).

    Press et al. 2021 (arXiv:2108.12409). Added after the scores are divided by sqrt(D), zero at the
    query's own key. No longest length; far keys fade out, at slope 1/2 to an exact zero in float32
    some 200 tokens away, so the steep heads are windows. No parameters.
    """

    enters = "score"
    relative = True
    slopes: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.scale = 1.0  # of all slopes; an extension lowers it
        self.constant(
            "slopes", torch.tensor(alibi_slopes(site.n_heads), dtype=torch.float64)
        )  # (H,)

    def slope(self) -> Tensor:
        """m_h -> (H,)"""
        return self.slopes * self.scale

    def distance_bias(self, d: Tensor) -> Tensor:
        return -over_heads(self.slope(), d) * d.to(self.slopes)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """m_h sqrt(D) times j: m_h j equals -m_h (i - j) up to the constant m_h i of a row."""
        key = pos.to(self.slopes).view(-1, 1, pos.shape[-1], 1)  # (1 or B, 1, T, 1)
        query = (self.slope() * self.site.d_head**0.5).view(1, -1, 1, 1)  # (1, H, 1, 1)
        shape = (key.shape[0], query.shape[1], key.shape[2], 1)  # (1 or B, H, T, 1)
        return query.expand(shape), key.expand(shape)


class AlibiLearned(Alibi):
    """b_h(d) = -m_h e^t_h d: ALiBi whose slopes train on a log scale, from m_h = 2^(-8h / H).

    Press et al. 2021 (arXiv:2108.12409) tried trained slopes and kept fixed ones. On a log scale,
    which keeps them positive, as in x-transformers and in the code of Kazemnejad et al. 2023
    (arXiv:2305.19466); both have the whole ln m_h as the parameter, which differs by a constant.
    Far keys fade out as in ALiBi, unless a slope has gone towards 0. One set for all layers:
    n_heads parameters.
    """

    shared = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.log_scale = nn.Parameter(torch.zeros(site.n_heads))  # t

    def slope(self) -> Tensor:
        return super().slope() * self.log_scale.to(self.slopes).exp()


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance of every T5 bucket.

    Half of the buckets hold one distance each, 0 .. e - 1. The other n = buckets - e divide
    ln(d / e) evenly up to ln(max_distance / e): number c of them starts at the smallest d with
    n ln(d / e) / ln(max_distance / e) >= c. Solved in whole numbers, d^n e^c >= e^n max_distance^c,
    so that no logarithm rounds across an edge.
    """
    exact = buckets // 2
    spread = buckets - exact
    starts = list(range(exact))
    d = exact
    for c in range(spread):
        while d**spread * exact**c < exact**spread * max_distance**c:
            d += 1
        starts.append(d)
    return starts


class T5(Scheme):
    """b_h(d) = a trained number of the bucket of d: exact up to `buckets` / 2, then logarithmic.

    Raffel et al. 2019 (arXiv:1910.10683), causal form. All distances from about max_distance on
    (113 with the paper's 32 and 128) share the last bucket. Scores keep their 1 / sqrt(D), which T5
    itself leaves to the initialisation. One table for all layers: buckets * n_heads parameters.
    """

    enters = "score"
    relative = True
    shared = True
    starts: Tensor

    def __init__(
        self, site: Site, buckets: int = 32, max_distance: int = 128, init_std: float = 0.1
    ) -> None:
        super().__init__(site)
        if buckets < 2 or max_distance <= buckets // 2:
            raise UserError(
                f"t5: buckets {buckets} and max_distance {max_distance}; buckets must be at least "
                "2 and max_distance above buckets / 2, the paper has 32 and 128"
            )
        starts = torch.tensor(bucket_starts(buckets, max_distance))  # (buckets,)
        self.register_buffer("starts", starts, persistent=False)
        self.weight = nn.Parameter(torch.empty(buckets, site.n_heads))
        nn.init.normal_(self.weight, std=init_std)

    def bucket(self, d: Tensor) -> Tensor:
        """The bucket of each distance d >= 0; same shape, int64."""
        return torch.searchsorted(self.starts, d.long().contiguous(), right=True) - 1

    def distance_bias(self, d: Tensor) -> Tensor:
        bias = F.embedding(self.bucket(d), self.weight).movedim(-1, 0)  # (H, *d.shape)
        return bias.to(torch.promote_types(bias.dtype, torch.float32))


class _Within(torch.autograd.Function):
    """x clamped to low .. high, where the gradient may still lead back inside.

    A plain clamp has no gradient outside, so that a parameter which leaves never returns. With this
    one a step downhill acts as if the parameter itself were clamped after it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.range = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), (grad,) = ctx.saved_tensors, ctx.range, grads
        leaves = (x <= low) & (grad > 0) | (x >= high) & (grad < 0)
        return grad.masked_fill(leaves, 0), None, None


class KerpleLog(Scheme):
    """b_h(d) = -p_h ln(1 + a_h d) with trained p_h, a_h >= 0.01.

    Chi et al. 2022 (arXiv:2205.09921), the logarithmic one of its kernels; p starts uniform in
    0 .. 2 and a in 0 .. 1, as in the authors' code. No longest length: a key twice as far away
    loses a factor 2^p of its weight, never all of it. The authors clamp the parameters themselves
    before each pass, here they are read clamped. NeMo starts at ALiBi's slopes instead. One set for
    all layers: 2 n_heads parameters.
    """

    enters = "score"
    relative = True
    shared = True
    most = math.inf  # upper bound of p

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.p = nn.Parameter(2 * torch.rand(site.n_heads))
        self.a = nn.Parameter(torch.rand(site.n_heads))

    def distance_bias(self, d: Tensor) -> Tensor:
        p = over_heads(_Within.apply(self.p, 0.01, self.most), d)
        a = over_heads(_Within.apply(self.a, 0.01, math.inf), d)
        return self.kernel(d.to(p), p, a)

    def kernel(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        """The bias. d: any shape; p, a: (H, 1, ...) -> (H, *d.shape)."""
        return -p * (a * d).log1p()


class KerplePower(KerpleLog):
    """b_h(d) = -a_h d^p_h with trained a_h >= 0.01 and 0.01 <= p_h <= 2.

    Chi et al. 2022 (arXiv:2205.09921), the power kernel, which is ALiBi at p = 1; p starts uniform
    in 0 .. 2 and a in 0 .. 1, as in the authors' code. No longest length: far keys lose their
    weight altogether, the later the smaller p is. One set for all layers: 2 n_heads parameters.
    """

    most = 2.0

    def kernel(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        return -a * d**p


class Fire(Scheme):
    """b(i, j) = MLP(psi(i - j) / psi(max(i, L))), psi(x) = ln(1 + |c| x), one output a head.

    Li et al. 2023 (arXiv:2310.04418). The MLP has one hidden layer of `width` ReLUs; c and a factor
    of the threshold L are trained, too. From position L on the distance counts relative to the
    position ("progressive interpolation"), so no argument is ever beyond those of training.
    `threshold` L (None: the training length) is 512 in the paper, which would leave shorter
    training without that part. The code of DAPE has half of it, and leaky ReLUs in one class.
    2 width + (width + 1) n_heads + 2 parameters a layer.
    """

    enters = "score"

    def __init__(
        self, site: Site, width: int = 32, threshold: int | None = None, c: float = 0.1
    ) -> None:
        super().__init__(site)
        start = site.train_len if threshold is None else threshold
        if width < 1 or start < 1:
            raise UserError(
                f"fire: width {width} and threshold {start}; both must be at least 1, the paper "
                "has 32 and 512"
            )
        if c <= 0:
            raise UserError(f"fire: c is {c}; it must be above 0, the paper has 0.1")
        self.threshold = start
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, site.n_heads)
        self.c = nn.Parameter(torch.tensor(c))
        self.factor = nn.Parameter(torch.tensor(1.0))  # of the threshold

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        wide = torch.promote_types(self.c.dtype, torch.float32)
        c, start = self.c.to(wide).abs(), self.factor.to(wide).abs() * self.threshold
        longest = torch.maximum(i.to(wide), start)[..., None, :, None]  # (1, T, 1), (B, 1, T, 1)
        d = distances(i, j).to(wide)  # (1, T, S) or (B, 1, T, S)
        x = (c * d).log1p() / ((c * longest).log1p() + 1e-6)
        with torch.no_grad():
            piece = torch.bucketize(x, self.kinks(wide)[0])  # like x
        # The same lines for each query: (H, T, width + 1) or (B, H, T, width + 1).
        shape = (*x.shape[:-3], self.site.n_heads, x.shape[-2], -1)
        slope, offset = (table[:, None].expand(shape) for table in self.pieces(wide))
        return z + (spread(slope, piece) * x + spread(offset, piece))

    def kinks(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where a hidden unit is 0, in order, and the unit of each: (width,), (width,)."""
        weight, bias = self.hidden.weight[:, 0].to(dtype), self.hidden.bias.to(dtype)
        return torch.where(weight == 0, torch.inf, -bias / weight).sort()

    def pieces(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The MLP as what it is: a straight line for each head between two kinks.

        Exact, and it spares the hidden layer of each pair, T x S x width numbers.
        Returns slopes and offsets, each (H, width + 1).
        """
        with torch.no_grad():
            order = self.kinks(dtype)[1]
        weight, bias = self.hidden.weight[order, 0].to(dtype), self.hidden.bias[order].to(dtype)
        piece = torch.arange(len(order) + 1, device=order.device)[:, None]  # (width + 1, 1)
        rank = torch.arange(len(order), device=order.device)  # (width,)
        beyond = piece > rank  # piece number p lies after p kinks
        on = torch.where(weight == 0, bias > 0, beyond == (weight > 0))  # (width + 1, width)
        out = self.out.weight[:, None, order].to(dtype) * on  # (H, width + 1, width)
        slope, offset = (out * weight).sum(-1), (out * bias).sum(-1)  # (H, width + 1)
        return slope, offset + self.out.bias.to(dtype)[:, None]


class Sandwich(Scheme):
    """b_h(d) = H / (8h) (sum_c cos(d w_c) - D' / 2), w_c = base^(-2c / D'), c = 1 .. D' / 2.

    Chi et al. 2022 (arXiv:2212.10356): the product of two sinusoidal position vectors of width D',
    here `d_bar`, as a bias of its own; h = 1 .. H. 0 at the query's own key, roughly -ln d near by;
    beyond the training length it goes on falling, but not evenly, as it is a sum of cosines. The
    paper tunes D' to 128; NeMo takes the head width. No parameters.
    """

    enters = "score"
    relative = True
    gains: Tensor

    def __init__(self, site: Site, d_bar: int = 128, base: float = 10000.0) -> None:
        super().__init__(site)
        if d_bar < 2 or d_bar % 2:
            raise UserError(
                f"sandwich: d_bar is {d_bar}; it must be even and at least 2, the paper has 128"
            )
        if base <= 1:
            raise UserError(f"sandwich: base is {base}; it must be above 1, the paper has 10000")
        self.d_bar = d_bar
        self.base = base
        head = torch.arange(1, site.n_heads + 1, dtype=torch.float64)
        self.constant("gains", site.n_heads / (8 * head))  # (H,)

    def vectors(self, pos: Tensor) -> Tensor:
        """The sinusoidal vector of each position, whose products make the bias.

        pos: any shape -> (*pos.shape, D'), float64. Frequencies start at c = 1, one step below
        those of Vaswani et al.
        """
        slower = pos.double() * self.base ** (-2 / self.d_bar)
        return sinusoids(slower, self.d_bar, self.base, -1)

    def distance_bias(self, d: Tensor) -> Tensor:
        flat = d.reshape(-1)
        # In parts, as each distance takes D' numbers; the odd columns are the cosines.
        sums = torch.cat([self.vectors(part)[:, 1::2].sum(-1) for part in flat.split(2**13)])
        fall = (sums - self.d_bar / 2).view(d.shape)  # float64
        return over_heads(self.gains, d) * fall.to(self.gains)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """sin a sin b + cos a cos b = cos(a - b), so the bias is a product of D' dimensions.

        Keys without their mean, which adds a constant to a row: the slow dimensions, nearly the
        same everywhere, would otherwise take most of the digits.
        """
        vectors = self.vectors(pos).view(-1, 1, pos.shape[-1], self.d_bar)  # (1 or B, 1, T, D')
        key = (vectors - vectors.mean(-2, keepdim=True)).to(self.gains)
        gains = (self.gains * self.site.d_head**0.5)[:, None, None]  # (H, 1, 1)
        query = vectors.to(gains) * gains  # (1 or B, H, T, D')
        return query, key.expand_as(query)


class Tisa(Scheme):
    """b_h(d) = sum_s a_hs exp(-|b_hs| (d - c_hs)^2), s = 1 .. `kernels`: trained bumps.

    Wennberg & Henter 2021 (arXiv:2106.01950): height a, sharpness b and place c of each, in the
    paper over j - i, which changes the sign of c. They start at 0.1, 0.1 and within some 5 tokens,
    as in the authors' code. A bump ends, so far keys have no position at all. 3 kernels n_heads
    parameters a layer; the paper's model, an ALBERT, shares everything between layers.
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, kernels: int = 5) -> None:
        super().__init__(site)
        if kernels < 1:
            raise UserError(f"tisa: kernels is {kernels}; it must be at least 1, the paper has 5")
        shape = kernels, site.n_heads
        self.height = nn.Parameter(torch.empty(shape))  # a
        self.sharpness = nn.Parameter(torch.empty(shape))  # b
        self.place = nn.Parameter(torch.empty(shape))  # c
        for parameter in (self.height, self.sharpness):
            nn.init.normal_(parameter, mean=0.1, std=0.01)
        nn.init.normal_(self.place, std=5.0)

    def distance_bias(self, d: Tensor) -> Tensor:
        bumps = []
        for kernel in zip(self.height, self.sharpness, self.place, strict=True):
            a, b, c = (over_heads(part, d) for part in kernel)  # (H, 1, ...)
            bumps.append(a * (-b.abs() * (d.to(c) - c) ** 2).exp())
        return torch.stack(bumps).sum(0)  # (H, *d.shape)


class Bam(Scheme):
    """b_h(d) = -e^alpha_h (|d + mu_h| + 1e-5)^beta_h, mu_h = 2 sinh(theta_h).

    Bianchessi et al. 2025 (arXiv:2505.22842), GGD-BAM: the log of a generalized Gaussian over the
    distance, trained. beta = 1 is ALiBi, beta = 0 NoPE, where training starts; beta < 0 turns
    attention away from near keys. Beyond the training length the power law goes on. The first code
    had alpha_init null, the log of ALiBi's slopes, and beta_init 1, one set for all layers; the
    published one has zeros and a set a layer. theta stays 0 unless train_mu. 2 n_heads parameters a
    layer, 3 with train_mu. The paper's best results pair it with SSMax.
    """

    enters = "score"
    relative = True

    def __init__(
        self,
        site: Site,
        alpha_init: float | None = 0.0,
        beta_init: float = 0.0,
        train_mu: bool = False,
    ) -> None:
        super().__init__(site)
        slopes = torch.tensor(alibi_slopes(site.n_heads))
        start = slopes.log() if alpha_init is None else torch.full_like(slopes, alpha_init)
        self.alpha = nn.Parameter(start)
        self.beta = nn.Parameter(torch.full((site.n_heads,), beta_init))
        self.theta = nn.Parameter(torch.zeros(site.n_heads)) if train_mu else None

    def distance_bias(self, d: Tensor) -> Tensor:
        alpha, beta = over_heads(self.alpha, d), over_heads(self.beta, d)
        away = d.to(alpha)[None]  # (1, *d.shape)
        if self.theta is not None:
            away = (away + 2 * over_heads(self.theta, d).sinh()).abs()  # (H, *d.shape)
        return -alpha.exp() * (away + 1e-5) ** beta


# -- extensions ----------------------------------------------------------------------------------


def alibi_interp(scheme: Alibi, length: int) -> Alibi:
    """Multiply the slopes by train_len / length beyond the training length.

    Al-Khateeb et al. 2023 (arXiv:2310.13017): position interpolation for ALiBi. The farthest key
    has the bias that it had in training, and near keys lie closer together. Up to the training
    length the scheme stays as it is.
    """
    changed = copy.deepcopy(scheme)
    changed.scale = min(1.0, scheme.site.train_len / length)
    return changed
