"""Biases that mix heads and content: a small network reads the scores of all heads and their bias.

    z_ij -> z_ij + b_ij + f([z_ij; b_ij])        hook: scores

[z; b] are the 2H numbers of a pair of tokens. b is that of any scheme with a bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Maker, Site
from posx.schemes.combine import Over
from posx.schemes.relative import distances

CHUNK_BYTES = 4 * 2**20  # memory of the hidden units of one chunk of queries


class Dape(Over):
    """z + b + f([z; b]), f two layers with `width` hidden units over the 2H numbers of a pair.

    DAPE, Zheng et al. 2024 (arXiv:2405.14722), also called CAPE: the bias adapts to the content,
    and heads see one another. With kernel=3 both layers are convolutions over 3 neighbouring keys:
    DAPE v2, Zheng et al. 2024 (arXiv:2410.04798). Keys after the query are 0 to either layer, so no
    future leaks in; the authors' code clears them before the first layer only, where the last query
    of an input differs from the same query in a longer one. Over a scheme without a bias f reads z
    alone, as their code does for NoPE and RoPE. Leaky ReLU. Beyond the training length b goes on as
    in the inner scheme. 2H kernel width + width + width kernel H + H parameters a layer, and those
    of the inner scheme, which each layer has for itself. O(T S width).
    """

    enters = "score"
    shared = False
    band = None  # neighbours in the sequence must be neighbours in the block

    def __init__(self, site: Site, over: Maker, kernel: int = 1, width: int = 32) -> None:
        super().__init__(site, over)
        if kernel < 1 or kernel % 2 == 0:
            raise UserError(
                f"dape: kernel is {kernel}; it must be odd, 1 for DAPE and 3 for DAPE v2, so that "
                "it reaches as far to either side of a key"
            )
        if width < 1:
            raise UserError(f"dape: width is {width}; it must be at least 1, the paper has 32")
        biased = self.over.overrides("distance_bias") or self.over.overrides("scores")
        inputs = (2 if biased else 1) * site.n_heads
        self.kernel = kernel
        self.hidden = nn.Conv2d(inputs, width, (1, kernel))
        self.out = nn.Conv2d(width, site.n_heads, (1, kernel))

    def overrides(self, hook: str) -> bool:
        """f reads the inner bias, so no path may add it elsewhere."""
        return hook not in ("distance_bias", "fold", "far") and super().overrides(hook)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        biased = z
        if self.over.overrides("distance_bias"):
            bias = self.over.distance_bias(distances(i, j).squeeze(-3))
            biased = z + bias.movedim(0, -3)  # (B, H, T, S)
        biased = self.over.scores(biased, q, k, i, j, state)
        seen = z if biased is z else torch.cat([z, biased - z], 1)  # (B, H or 2H, T, S)
        # A few queries at a time: hidden units take many times the memory of scores.
        n_queries, n_keys = z.shape[-2:]
        rows = max(1, CHUNK_BYTES // (4 * len(z) * self.hidden.out_channels * n_keys))
        firsts = range(n_keys - n_queries, n_keys, rows)
        with torch.autocast(z.device.type, enabled=False):
            parts = zip(seen.split(rows, 2), firsts, strict=True)
            return biased + torch.cat([self.mixed(part, first) for part, first in parts], 2)

    def mixed(self, seen: Tensor, first: int) -> Tensor:
        """f of some queries, the first of which is key number `first`. (B, C, T, S) -> (B, H, T, S)

        A convolution is a product with shifted keys. Shifted before the first layer and after the
        second, where there are few channels, it costs little more than none.
        """
        shifts = range(-(self.kernel // 2), self.kernel // 2 + 1)  # key j reads key j + shift
        assert self.hidden.bias is not None
        assert self.out.bias is not None
        into, out = self.hidden.weight.to(seen), self.out.weight.to(seen)  # (..., C, 1, kernel)
        into = into.permute(0, 3, 1, 2).flatten(1, 2)[..., None]  # (width, kernel C, 1, 1)
        out = out.permute(3, 0, 1, 2).flatten(0, 1)[..., None]  # (kernel H, width, 1, 1)
        if self.kernel > 1:
            seen = seen.tril(first)
            seen = torch.cat([_shifted(seen, by) for by in shifts], 1)  # (B, kernel C, T, S)
        hidden = F.leaky_relu_(F.conv2d(seen, into, self.hidden.bias.to(seen)))
        mixed = F.conv2d(hidden, out)  # (B, kernel H, T, S)
        if self.kernel > 1:
            parts = zip(mixed.tril(first).chunk(self.kernel, 1), shifts, strict=True)
            mixed = torch.stack([_shifted(part, by) for part, by in parts]).sum(0)
        return mixed + self.out.bias.to(seen)[:, None, None]


def _shifted(x: Tensor, by: int) -> Tensor:
    """Key j + by in the place of key j, 0 beyond the ends. (..., S) -> same."""
    start = max(0, by)
    return F.pad(x, (max(0, -by), start))[..., start : start + x.shape[-1]]
