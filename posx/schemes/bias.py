"""Score biases: a number that depends on the head and the distance, added before the softmax.

    z_ij + b_h(i - j)        hook: distance_bias

On long inputs attention reads the bias as views of one vector a head, so no T x S table is built.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Scheme, Site


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
        self.constant(
            "slopes", torch.tensor(alibi_slopes(site.n_heads), dtype=torch.float64)
        )  # (H,)

    def distance_bias(self, d: Tensor) -> Tensor:
        return -self.slopes.view(-1, *[1] * d.ndim) * d.to(self.slopes)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """m_h sqrt(D) times j: m_h j equals -m_h (i - j) up to the constant m_h i of a row."""
        key = pos.to(self.slopes).view(-1, 1, pos.shape[-1], 1)  # (1 or B, 1, T, 1)
        query = (self.slopes * self.site.d_head**0.5).view(1, -1, 1, 1)  # (1, H, 1, 1)
        shape = (key.shape[0], query.shape[1], key.shape[2], 1)  # (1 or B, H, T, 1)
        return query.expand(shape), key.expand(shape)


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
