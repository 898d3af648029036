"""Positions made of content: the tokens between a key and the query say how far apart they are.

    z_ij -> z_ij + something of the tokens j .. i        hook: scores (cope, selective, tapa)
    weights by breaking a stick from the query backwards        hook: normalize (stickbreaking)
    angles that the tokens add up to        hook: prepare (selective_rope, carope, repo)

Products of reflections are in path.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Maker, Scheme, Site
from posx.schemes.combine import Over
from posx.schemes.relative import distances
from posx.schemes.rotary import check_head, rotate


def widened(x: Tensor) -> Tensor:
    """x in float32 or more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(x) in float32 or more, also in a bfloat16 model and under autocast: angles and
    reflections are summed or multiplied over many tokens. (..., E) -> (..., W)"""
    bias = None if linear.bias is None else widened(linear.bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(widened(x), widened(linear.weight), bias)


def causal_conv(x: Tensor, project: nn.Linear, taps: Tensor, past: Tensor | None) -> Tensor:
    """Each column of x's projection, summed over the last tokens with weights of its own.

    x: (B, T, R), `project` takes it to width W: what is cached is narrower; taps: (n, W), the last
    one for the token itself; past: x of the n - 1 tokens before, or of fewer, or None.
    -> (B, T, W), in float32 or more.
    """
    known = x if past is None else torch.cat([past, x], 1)
    missing = x.shape[1] + len(taps) - 1 - known.shape[1]
    columns = F.pad(wide(project, known), (0, 0, missing, 0))  # (B, n - 1 + T, W)
    shifted = [columns[:, t : t + x.shape[1]] * tap for t, tap in enumerate(widened(taps))]
    return torch.stack(shifted).sum(0)


def summed(x: Tensor, past: Tensor | None) -> Tensor:
    """Running sums over the tokens, which go on from the last of `past`. (B, T, W) -> same."""
    sums = x.cumsum(1, dtype=torch.float64)
    return (sums if past is None else sums + past[:, -1:]).to(x.dtype)


def sum_after(x: Tensor) -> Tensor:
    """Sums along the last axis from each element to the end, itself included. (..., S) -> same.

    Summed from the end, so that those near it keep their digits in a long row.
    """
    return x.flip(-1).cumsum_(-1).flip(-1)


class Cope(Scheme):
    """z_ij + q_i e[p_ij], p_ij = sum of sigmoid(z_it) over j <= t <= i: the query counts the keys
    that it chooses, and reads the table e between its rows by linear interpolation.

    Golovneva et al. 2024 (arXiv:2405.18719). The table has `max_pos` rows, shared by the heads
    (None: one more than training has positions, as in the authors' code; the paper's language
    models have 64 rows for 1024 tokens). Counts of max_pos - 1 and more share the last row, at any
    length, so that a longer input is new only where more gates open. q_i is not divided by sqrt(D)
    here, as in the paper's listing and in x-transformers; scaled=true divides it, as the authors'
    released code does by default. e starts at 0. max_pos d_head parameters a layer. O(T S).
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, max_pos: int | None = None, scaled: bool = False) -> None:
        super().__init__(site)
        rows = site.positions + 1 if max_pos is None else max_pos
        if rows < 2:
            raise UserError(
                f"cope: max_pos is {rows}; it must be at least 2, for there to be two rows to lie "
                "between, the paper has 64"
            )
        self.scaled = scaled
        self.table = nn.Parameter(torch.zeros(rows, site.d_head))

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        # Keys after the query must not count: above the diagonal the gates are closed.
        count = sum_after(widened(z).sigmoid().tril(z.shape[3] - z.shape[2]))  # (B, H, T, S)
        count = count.clamp_(max=len(self.table) - 1)
        row = count.long()
        at_rows = widened(q @ self.table.T)  # (B, H, T, max_pos)
        if self.scaled:
            at_rows = at_rows * q.shape[-1] ** -0.5
        steps = F.pad(at_rows.diff(dim=-1), (0, 1))  # to the next row
        added = z + at_rows.gather(-1, row)
        return added.addcmul_(count.frac(), steps.gather(-1, row))


class StickBreaking(Scheme):
    """p_ij = s(z_ij) prod over j < t < i of (1 - s(z_it)), s the sigmoid: from the nearest
    key to the farthest, each breaks its share off what the nearer ones have left.

    Tan et al. 2024 (arXiv:2410.17980), in place of the softmax: near keys come first, so no other
    position is needed. The query's own token is no key; with attend_current=true it is the first of
    them. The weights of a row sum to 1 or less: the rest is lost, so that the first token gets 0.
    Nothing limits the length: what is broken off near the query does not depend on what is far.
    No parameters.
    """

    enters = "softmax"
    relative = True

    def __init__(self, site: Site, attend_current: bool = False) -> None:
        super().__init__(site)
        self.attend_current = attend_current

    def normalize(self, z: Tensor) -> Tensor:
        z = widened(z)
        if not self.attend_current:
            n_queries, n_keys = z.shape[-2:]
            own = torch.ones(n_queries, n_keys, dtype=torch.bool, device=z.device)
            z = z.masked_fill(own.triu(n_keys - n_queries), -torch.inf)
        # In logarithms: log s(z) = z - log(1 + e^z) and log(1 - s(z)) = -log(1 + e^z). Hidden keys
        # have -inf and 0.
        return (z - sum_after(F.softplus(z))).exp_()


CHUNK_BYTES = 4 * 2**20  # memory of the scores of earlier queries that are held at once


class Selective(Over):
    """z_ij - F_ij, F_ij = sum of max(0, z_lj of head 0) over j < l < i: a token that has seen a key
    can hide it from all later ones, in every head.

    Leviathan et al. 2024 (arXiv:2410.02703). A token hides neither itself nor the first one, which
    stands for BOS, and nothing from itself. F grows with the number of tokens in between, so an old
    key fades unless head 0 leaves it alone; no longest length. It stands over a scheme that acts
    before the scores, such as nope or rope. No parameters. A block of queries recomputes what the
    queries before it have hidden: O(S^2) of head 0 a block.
    """

    enters = "score"

    def __init__(self, site: Site, over: Maker) -> None:
        super().__init__(site, over)
        for hook in ("scores", "distance_bias", "mask", "far"):
            if self.over.overrides(hook):
                raise UserError(
                    f"selective: {type(self.over).__name__} changes the scores, and what earlier "
                    "queries hide is computed from q and k alone: use scheme.over=nope, "
                    "scheme.over=rope or another scheme that acts before the scores"
                )

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, state = self.over.prepare(x, q, k, v, pos, None)
        if state is not None:
            raise UserError(
                f"selective: {type(self.over).__name__} keeps a state of each token, and there is "
                "room for one only: use scheme.over=nope or scheme.over=rope"
            )
        return q, k, v, q[:, 0]  # (B, T, D): the queries of head 0

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        scale, (n_queries, n_keys) = q.shape[-1] ** -0.5, z.shape[2:]
        start = n_keys - n_queries  # queries before this block
        rows = max(1, CHUNK_BYTES // (4 * len(k) * n_keys))
        before = widened(z.new_zeros(len(k), 1, n_keys))  # (B, 1, S)
        for first in range(0, start, rows):
            last = min(first + rows, start)
            part = state[:, first:last], k[:, 0, :last], scale
            keep = torch.is_grad_enabled()  # no chunk for the backward pass
            hidden = checkpoint(_hides, *part, use_reentrant=False) if keep else _hides(*part)
            before = before + F.pad(hidden.sum(1, keepdim=True), (0, n_keys - last))
        hidden = _hides(state[:, start:], k[:, 0], scale)  # (B, T, S)
        return z - torch.cat([before, hidden[:, :-1]], 1).cumsum(1)[:, None]


def _hides(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How much each query hides of each key: earlier ones only, and not the first.

    q: (B, T, D), the queries of the last T tokens of k: (B, S, D) -> (B, T, S), float32 or more.
    """
    with torch.autocast(q.device.type, enabled=False):
        z = (widened(q) * scale) @ widened(k).mT
    z.tril_(k.shape[1] - q.shape[1] - 1)[..., :1].zero_()
    return z.relu_()


class SelectiveRope(Scheme):
    """R_t turns pair c by the sum of a_s base^(-2c / d_head) over the tokens s <= t: RoPE by angles
    that the tokens choose.

    Movahedi et al. 2025 (arXiv:2511.17388). a comes from x, of length 1 in the columns of each
    head, by a projection of low rank and a causal convolution over the last `taps` tokens, one
    number a head and pair, of either sign. So a token may stand still, turn back or undo another,
    and the angle between key and query is what lies between them, without a longest length; it
    wanders off or not as the tokens do. Options of the authors' code, off there by default: silu
    after the convolution; bias, + exp(g) with a trained g, as at g = 0 in RoPE; phase_gate, times a
    sigmoid of x, one a head. rank (d_model + d / 2) + taps d / 2 parameters a layer,
    d = n_heads d_head; the bias has d / 2 more, the gate (d_model + 1) n_heads. q and k only.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor

    def __init__(
        self,
        site: Site,
        rank: int = 16,
        taps: int = 4,
        base: float = 500000.0,
        silu: bool = False,
        bias: bool = False,
        phase_gate: bool = False,
    ) -> None:
        super().__init__(site)
        check_head("selective_rope", site, base)
        if rank < 1 or taps < 1:
            raise UserError(
                f"selective_rope: rank {rank} and taps {taps}; both must be at least 1, the "
                "authors have 16 and 4"
            )
        if site.d_model % site.n_heads:
            raise UserError(
                f"selective_rope: d_model {site.d_model} does not divide into {site.n_heads} heads "
                "with columns of x each: use a multiple of model.n_heads"
            )
        self.silu = silu
        n_heads, width = site.n_heads, site.n_heads * site.d_head // 2
        self.down = nn.Linear(site.d_model, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.taps = nn.Parameter(torch.empty(taps, width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.gate = nn.Linear(site.d_model, n_heads) if phase_gate else None
        # Turns of about half a radian a token and fastest pair.
        nn.init.normal_(self.down.weight, std=n_heads**-0.5)
        nn.init.normal_(self.up.weight, std=rank**-0.5)
        nn.init.uniform_(self.taps, -(taps**-0.5), taps**-0.5)
        self.constant("inv_freq", frequencies.rope(base, site.d_head))  # (F,)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n_heads, width = self.site.n_heads, self.up.out_features
        x = F.normalize(widened(x).unflatten(-1, (n_heads, -1)), dim=-1).flatten(-2)  # (B, T, E)
        low = wide(self.down, x)  # (B, T, rank)
        recent = max(1, len(self.taps) - 1)
        old = None if past is None else past[:, -recent:, width:]
        turn = causal_conv(low, self.up, self.taps, old)  # (B, T, H F)
        turn = F.silu(turn) if self.silu else turn
        turn = turn if self.bias is None else turn + widened(self.bias).exp()
        if self.gate is not None:
            gate = wide(self.gate, x).sigmoid()[..., None]  # (B, T, H, 1)
            turn = (turn.unflatten(-1, (n_heads, -1)) * gate).flatten(-2)
        turned = summed(turn, None if past is None else past[..., :width])
        angle = turned.unflatten(-1, (n_heads, -1)).transpose(1, 2) * self.inv_freq  # (B, H, T, F)
        q, k = (rotate(part, angle.cos(), angle.sin(), interleaved=False) for part in (q, k))
        return q, k, v, torch.cat([turned, low], -1)  # (B, T, H F + rank)


class Carope(Scheme):
    """R_t turns pair c of a head by the sum of f(x_s)^c over the tokens s <= t, with
    f = 1 / (1 + softplus(w x + b)): RoPE by a base that each token chooses, between 0 and 1.

    Veisi et al. 2025 (arXiv:2507.23083). RoPE is f = base^(-2 / d_head) for all tokens, and that is
    where training starts: w = 0 and a b that the paper's formula lacks, which does not say how it
    starts there. Pair 0 turns by 1 a token; where f is small, the last pairs all but stand
    still. No longest length; beyond the training length slow pairs reach new angles, as in RoPE.
    (d_model + 1) n_heads parameters a layer.
    """

    enters = "q/k"
    relative = True
    pair: Tensor

    def __init__(self, site: Site, base: float = 10000.0) -> None:
        super().__init__(site)
        check_head("carope", site, base)
        self.constant("pair", torch.arange(site.d_head // 2, dtype=torch.float64))  # (F,)
        self.choose = nn.Linear(site.d_model, site.n_heads)
        nn.init.zeros_(self.choose.weight)
        nn.init.constant_(self.choose.bias, math.log(math.expm1(base ** (2 / site.d_head) - 1)))

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        f_log = -F.softplus(wide(self.choose, x)).log1p()  # (B, T, H)
        turn = (f_log[..., None] * self.pair).exp().flatten(2)  # (B, T, H F)
        turned = summed(turn, past)
        angle = turned.unflatten(-1, (self.site.n_heads, -1)).transpose(1, 2)  # (B, H, T, F)
        q, k = (rotate(part, angle.cos(), angle.sin(), interleaved=False) for part in (q, k))
        return q, k, v, turned


class Repo(Scheme):
    """RoPE at positions that each token chooses for itself and head:
    p = W (silu(G x) * (C x)), any real number.

    Li et al. 2025 (arXiv:2512.14391). G and C have `hidden` rows (None: d_model / 8). Layers before
    `start_layer` (None: 5/16 of them, the paper's 5 of 16 and 10 of 32) have RoPE by the token
    count. The paper changes a trained RoPE model; here it is trained from the start. Chosen
    positions do not grow with the length, and tell nothing of the order but through what x holds
    of it. 2 d_model hidden + hidden n_heads parameters in each layer from start_layer on.
    """

    enters = "q/k"
    relative = True
    inv_freq: Tensor

    def __init__(
        self,
        site: Site,
        base: float = 10000.0,
        hidden: int | None = None,
        start_layer: int | None = None,
    ) -> None:
        super().__init__(site)
        check_head("repo", site, base)
        rows = max(1, site.d_model // 8) if hidden is None else hidden
        start = 5 * site.n_layers // 16 if start_layer is None else start_layer
        if rows < 1 or not 0 <= start < site.n_layers:
            raise UserError(
                f"repo: hidden {rows} and start_layer {start} of {site.n_layers} layers; use at "
                "least 1 row, and a layer from 0 that the model has"
            )
        self.constant("inv_freq", frequencies.rope(base, site.d_head))  # (F,)
        self.chooses = site.layer >= start
        if self.chooses:
            self.gate, self.content = (nn.Linear(site.d_model, rows, bias=False) for _ in range(2))
            self.final = nn.Linear(rows, site.n_heads, bias=False)
            for linear in (self.gate, self.content):
                nn.init.normal_(linear.weight, std=site.d_model**-0.5)
            nn.init.normal_(self.final.weight, std=rows**-0.5)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        where = pos.to(self.inv_freq)[..., None]  # (T, 1) or (B, T, 1)
        if self.chooses:
            hidden = F.silu(wide(self.gate, x)) * wide(self.content, x)  # (B, T, hidden)
            where = wide(self.final, hidden).mT[..., None]  # (B, H, T, 1)
        angle = where * self.inv_freq  # (..., T, F)
        q, k = (rotate(part, angle.cos(), angle.sin(), interleaved=False) for part in (q, k))
        return q, k, v, None


class Tapa(Scheme):
    """z_ij = q_A k_A / sqrt(A) cos(2 pi (i - j)^alpha q_P k_P / sqrt(D - A)), q = (q_A, q_P): one
    part of a head says how much, the other at which distances.

    Wang et al. 2025 (arXiv:2509.12635). A = `share` D. The phase grows so slowly with the distance
    that 64 times as far is 1.5 times the phase at alpha = 0.1; no longest length, and the mean over
    tokens of a far score goes to 0. The query's own key has phase 0. No parameters.
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, alpha: float = 0.1, share: float = 0.5) -> None:
        super().__init__(site)
        self.amplitude = round(share * site.d_head)
        if alpha <= 0 or not 0 < self.amplitude < site.d_head:
            raise UserError(
                f"tapa: alpha {alpha} and share {share} of d_head {site.d_head}; both must be "
                "above 0 and leave each part of a head a dimension, the paper has 0.1 and 0.5"
            )
        self.alpha = alpha

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        a, d = self.amplitude, q.shape[-1]
        with torch.autocast(z.device.type, enabled=False):  # a phase needs its digits
            amount, phase = (
                widened(q[..., part]) @ widened(k[..., part]).mT for part in (slice(a), slice(a, d))
            )  # (B, H, T, S)
        turns = distances(i, j).to(phase) ** self.alpha * (2 * math.pi * (d - a) ** -0.5)
        turns = (turns * phase).cos().mul_(a**-0.5).sub_(d**-0.5)
        z = z - phase * d**-0.5  # what is not q k^T stays
        return z.addcmul_(amount, turns)
