"""Relative vectors: each clipped offset j - i has a vector that keys and values gain.

    z_ij = q_i (k_j + a_K[j - i]) / sqrt(D)     out_i = sum_j p_ij (v_j + a_V[j - i])

hooks: scores for the keys, value for the values. The few distinct vectors are multiplied once and
then spread over the keys, so nothing of size T x S x D is built.
"""

import torch
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Scheme, Site


class Shaw(Scheme):
    """a_K and a_V are rows clip(j - i, -k, k) + k of two tables with 2k + 1 rows each.

    Shaw et al. 2018 (arXiv:1803.02155). The tables belong to a layer and are shared by its heads.
    All distances of k and more share one row, at any length. Under causality only the k + 1 rows of
    j <= i are read; the others keep the paper's shape and are never trained. 2 (2k + 1) d_head
    parameters a layer, half with on_values=false. O(T S) time and memory, like the scores.
    """

    enters = "score+value"
    relative = True

    def __init__(
        self, site: Site, k: int = 16, on_values: bool = True, init_std: float = 0.1
    ) -> None:
        super().__init__(site)
        if k < 1:
            raise UserError(f"shaw: k is {k}; it must be at least 1, the paper has 16")
        self.k = k
        self.keys = nn.Parameter(torch.empty(2 * k + 1, site.d_head))
        nn.init.normal_(self.keys, std=init_std)
        self.values: nn.Parameter | None = None
        if on_values:
            self.values = nn.Parameter(torch.empty(2 * k + 1, site.d_head))
            nn.init.normal_(self.values, std=init_std)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        past = self.keys[: self.k + 1]  # (k + 1, D)
        offset = q @ past.T * self.site.d_head**-0.5  # (B, H, T, k + 1)
        return z + offset.gather(-1, self._rows(i, j).expand(z.shape))

    def value(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        if self.values is None:
            return None
        past = self.values[: self.k + 1]  # (k + 1, D)
        weight = p.new_zeros(*p.shape[:-1], self.k + 1)  # (B, H, T, k + 1)
        weight = weight.scatter_add(-1, self._rows(i, j).expand(p.shape), p)
        return weight @ past

    def _rows(self, i: Tensor, j: Tensor) -> Tensor:
        """clip(j - i, -k, 0) + k, the row of each pair -> (1, T, S).

        Keys after the query, j > i, read row k like the query's own: attention masks them.
        """
        offset = j[..., None, :] - i[..., :, None]  # (T, S)
        return offset.clamp(-self.k, 0).unsqueeze(-3) + self.k
