"""PaTH: every token on the way from a key to the query reflects the key, by a vector of its own.

    z_ij = k_j^T H_{j+1} ... H_i q_i / sqrt(D),  H_t = I - b_t w_t w_t^T        hook: scores

Products of such matrices are computed chunk by chunk, so nothing of size S x D x D is built.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Scheme, Site
from posx.schemes.contextual import causal_conv, wide
from posx.schemes.gates import faded, gate

CHUNK = 32  # tokens whose reflections are merged into one matrix


def reflected_scores(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """k_j^T H_{j+1} ... H_i q_i of the last T of S tokens; finite where j > i.

    q: (B, H, T, D); k, w: (B, H, S, D), b: (B, H, S) -> (B, H, T, S), in w's precision.

    Inside a chunk, with W its vectors as rows, the UT transform (Joffrain et al. 2006) is
    H_last ... H_first = I - W^T U W,  U = (I + tril(diag(b) W W^T, -1))^-1 diag(b), and a product
    of fewer of them needs the same U, masked. Queries walk from the last chunk back to the first:
    each chunk compares them with its keys, brought to its end, and then takes them to its start.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    first = (n_keys - n_queries) // CHUNK  # chunk of the first query
    n_chunks = -(-n_keys // CHUNK)
    after = n_chunks * CHUNK - n_keys
    k, w = (F.pad(x, (0, 0, 0, after)).unflatten(2, (-1, CHUNK)) for x in (k, w))  # (B, H, N, C, D)
    before = n_keys - n_queries - first * CHUNK
    q = F.pad(q, (0, 0, before, after)).unflatten(2, (-1, CHUNK))  # (B, H, M, C, D), M = N - first
    scale = F.pad(b, (0, after)).unflatten(2, (-1, CHUNK)).diag_embed()  # (B, H, N, C, C)
    eye = torch.eye(CHUNK, dtype=w.dtype, device=w.device)
    merge = torch.linalg.solve_triangular(
        eye + (scale @ w @ w.mT).tril(-1), scale, upper=False, unitriangular=True
    )  # U: (B, H, N, C, C)
    on_keys = merge @ (w @ k.mT).tril(-1)  # (B, H, N, C, C)
    at_end = k - on_keys.mT @ w  # H_last ... H_{j+1} k_j: (B, H, N, C, D)
    whole = w.mT @ merge @ w  # I - H_last ... H_first: (B, H, N, D, D)
    on_queries = (q @ w[:, :, first:].mT).tril()  # (B, H, M, C, C)
    inside = q @ k[:, :, first:].mT - on_queries @ on_keys[:, :, first:]  # (B, H, M, C, C)
    at_start = q - on_queries @ (merge @ w)[:, :, first:]  # H_first ... H_i q_i: (B, H, M, C, D)

    columns = []
    walking = q.new_zeros(*q.shape[:2], 0, q.shape[-1])  # queries of later chunks: (B, H, R, D)
    for chunk in range(n_chunks - 1, -1, -1):
        column = walking @ at_end[:, :, chunk].mT  # (B, H, R, C)
        walking = walking - walking @ whole[:, :, chunk]
        own = chunk - first
        if own >= 0:  # its own queries join
            column = F.pad(torch.cat([inside[:, :, own], column], 2), (0, 0, own * CHUNK, 0))
            walking = torch.cat([at_start[:, :, own], walking], 2)
        columns.append(column[:, :, before : before + n_queries])  # (B, H, T, C)
    return torch.cat(columns[::-1], -1)[..., :n_keys]  # (B, H, T, S)


class Path(Scheme):
    """z_ij = k_j^T H_{j+1} ... H_i q_i / sqrt(D), H_t = I - b_t w_t w_t^T: position is what the
    tokens from key to query do to the key, one Householder-like matrix each.

    Yang et al. 2025 (arXiv:2505.16381). b_t = 2 sigmoid(u x_t + c); w_t has length 1 and comes from
    x by a projection of low rank and a causal convolution over the last 3 tokens, and SiLU, which
    the authors' code (fla) has and the paper does not mention. No longest length; far keys shrink
    into the directions that no token on the way reflects. With forget_gate=true (path_fox,
    PaTH-FoX) keys fade too: + sum of log sigmoid(g x_t + h) over j < t <= i, added to the scaled
    score as in FoX, Lin et al. 2025 (arXiv:2503.02130); fla divides it by sqrt(D) with the rest, as
    here scale_gate=true. h starts at bias_init: at 0, as in fla, a token forgets half at first, at
    4 one in fifty, learned in fewer steps. rank (d_model + d) + 3 d + (d_model + 1) n_heads
    parameters a layer, d = n_heads d_head; the gate has (d_model + 1) n_heads more. Three times the
    products of a plain score, and S d_head^2 for each block of queries.
    """

    enters = "score"
    relative = True

    def __init__(
        self,
        site: Site,
        rank: int = 32,
        silu: bool = True,
        forget_gate: bool = False,
        scale_gate: bool = False,
        bias_init: float = 0.0,
    ) -> None:
        super().__init__(site)
        if rank < 1:
            raise UserError(f"path: rank is {rank}; it must be at least 1, the authors have 32")
        if scale_gate and not forget_gate:
            raise UserError(
                "path: scale_gate=true scales the gate of forget_gate=true, which is off"
            )
        self.silu, self.scale_gate = silu, scale_gate
        n_heads, width = site.n_heads, site.n_heads * site.d_head
        # The state of a token: w, b, the log of the gate, and what later convolutions need.
        self.columns = [width, n_heads, n_heads if forget_gate else 0, rank]
        self.down = nn.Linear(site.d_model, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.taps = nn.Parameter(torch.empty(3, width))  # the last one is the token's own
        self.strength = gate(site, n_heads)
        self.gate = gate(site, n_heads, bias_init) if forget_gate else None
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.uniform_(self.taps, -(3**-0.5), 3**-0.5)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        low = wide(self.down, x)  # (B, T, rank)
        old = None if past is None else past[:, -2:, -low.shape[-1] :]
        w = causal_conv(low, self.up, self.taps, old)  # (B, T, H D)
        w = F.silu(w) if self.silu else w
        w = F.normalize(w.unflatten(-1, (self.site.n_heads, -1)), dim=-1)  # (B, T, H, D)
        parts = [w.flatten(2), 2 * wide(self.strength, x).sigmoid()]
        if self.gate is not None:
            parts.append(F.logsigmoid(wide(self.gate, x)))
        return q, k, v, torch.cat([*parts, low], -1)  # (B, T, W)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        scale = self.site.d_head**-0.5
        w, b, forgets, _ = state.split(self.columns, -1)
        w = w.unflatten(-1, (self.site.n_heads, -1)).transpose(1, 2)  # (B, H, S, D)
        with torch.autocast(z.device.type, enabled=False):
            q, k = q.to(w.dtype), k.to(w.dtype)
            turned = reflected_scores(q, k, w, b.mT).sub_(q @ k.mT)
        z = z.add(turned, alpha=scale)  # what is not q k^T stays
        if self.gate is None:
            return z
        c = forgets.cumsum(1, dtype=torch.float64)  # (B, S, H)
        return z + faded(c * scale if self.scale_gate else c, z)
