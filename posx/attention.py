"""Where a scheme meets attention: causal attention under any scheme, by the fastest exact path.

The path follows from the hooks that the scheme overrides:

    sdpa    nothing touches the scores: the fused causal kernel
    strips  a function of i - j, in evaluation: fused kernel on blocks of queries, the bias a
            zero-copy strided view; or no bias, for the last of all queries
    masked  short inputs, a fixed bias in training or a mask: fused kernel, one additive mask
    folded  the bias as extra query and key dimensions, in training
    banded  blocks of queries that see only their window (and sinks): O(n w)
    merged  far keys through the fused kernel and near ones by the definition, in evaluation
    dense   one block, for short inputs
    blocks  blocks of queries, each with all its keys: O(n x block) memory

Only `masked` and `dense` build an n x n tensor, up to DENSE keys.
"""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posx.schemes.base import Scheme

DENSE = 1024  # keys up to which an n x n tensor is cheaper than blocks
STRIP_ROWS = 512  # queries a block of the fused kernel
MERGE_ROWS = 256  # queries a block whose near and far keys are merged
BLOCK_BYTES = 8 * 2**20  # memory of one (B, H, block, S) tensor

# The fused kernel with the logarithm of each row's sum; the one private name of torch used here.
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
WITH_LSE: Any = getattr(torch.ops.aten, _KERNEL) if hasattr(torch.ops.aten, _KERNEL) else None


class Buffer:
    """A tensor that grows along one axis. Its storage has room for half as much again, so that a
    token more copies nothing but itself. Without gradients: rows are written in place."""

    def __init__(self, first: Tensor, axis: int) -> None:
        self.axis, self.size = axis, first.shape[axis]
        self.storage = first

    @property
    def all(self) -> Tensor:
        """The rows so far, a view."""
        return self.storage.narrow(self.axis, 0, self.size)

    def append(self, new: Tensor) -> Tensor:
        """Add rows behind those so far, and return all of them."""
        n, size = new.shape[self.axis], self.size
        self.size += n
        if self.size > self.storage.shape[self.axis]:
            shape = list(new.shape)
            shape[self.axis] = self.size + self.size // 2
            storage, old = new.new_empty(shape), self.storage.narrow(self.axis, 0, size)
            storage.narrow(self.axis, 0, size).copy_(old)
            self.storage = storage
        self.storage.narrow(self.axis, size, n).copy_(new)
        return self.all


@dataclass
class Cache:
    """Keys, values, state and positions of the tokens seen so far, for one layer."""

    k: Buffer | None = None
    v: Buffer | None = None
    state: Buffer | None = None
    pos: Buffer | None = None

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.size

    @property
    def past(self) -> Tensor | None:
        """The state so far: (B, S, ...)."""
        return None if self.state is None else self.state.all

    def append(
        self, k: Tensor, v: Tensor, state: Tensor | None, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Add the new tokens and return those of all tokens."""
        if self.k is None or self.v is None or self.pos is None:
            self.k, self.v, self.pos = Buffer(k, 2), Buffer(v, 2), Buffer(pos, -1)
            self.state = None if state is None else Buffer(state, 1)
            return k, v, state, pos
        k = self.k.append(k)  # (B, H, S, D)
        v = self.v.append(v)  # (B, H, S, D)
        pos = self.pos.append(pos)  # (S,)
        if self.state is not None and state is not None:
            state = self.state.append(state)  # (B, S, ...)
        return k, v, state, pos


def choose_path(
    scheme: Scheme, n_queries: int, n_keys: int, training: bool, device: str = "cpu"
) -> str:
    """The path that `attend` takes, by the module's list. Depends on overridden hooks, on sizes and
    on the type of the device."""
    by_distance, masks = scheme.overrides("distance_bias"), scheme.overrides("mask")
    own_positions, content = scheme.overrides("positions"), scheme.overrides("scores")
    softmax = not (scheme.overrides("value") or scheme.overrides("normalize"))
    if softmax and not content and not masks:
        if not by_distance:
            return "sdpa" if n_queries in (1, n_keys) else "strips"
        if not own_positions and not training:
            return "strips"
    if softmax and not content and n_keys <= DENSE and (masks or not own_positions):
        trained = by_distance and any(True for _ in scheme.parameters())
        if not trained and not (by_distance and own_positions):
            return "masked"
    if softmax and not masks and training and scheme.overrides("fold"):
        return "folded"
    if scheme.band is not None and n_keys > sum(scheme.band):
        return "banded"
    if n_keys <= DENSE:
        return "dense"
    plain = not masks and not own_positions and not scheme.overrides("normalize")
    merges = scheme.overrides("far") and plain and not training and device == "cpu" and WITH_LSE
    return "merged" if merges else "blocks"


def attend(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, state: Tensor | None
) -> Tensor:
    """Causal attention of the last T of S tokens.

    q: (B, H, T, D); k, v: (B, H, S, D); i: (T,) and j: (S,) their positions;
    state: (B, S, ...) or None -> (B, H, T, D). Queries and keys may be wider than D.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    training = torch.is_grad_enabled()
    path = choose_path(scheme, n_queries, n_keys, training, q.device.type)
    if q.shape[-1] > v.shape[-1] and path in ("sdpa", "strips", "masked", "folded"):
        # The fused kernel takes equal widths only, and its fall-back builds n x n.
        wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return attend(scheme, q, k, wide, i, j, state)[..., : v.shape[-1]]
    scale = scheme.site.d_head**-0.5
    if path == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=n_queries > 1, scale=scale)
    if path == "strips":
        return _strips(scheme, q, k, v)
    if path == "masked":
        mask = _mask(scheme, i, j, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if path == "folded":
        return _folded(scheme, q, k, v, j, state)
    if path == "merged":
        return _merged(scheme, q, k, v, i, j, state)
    if path == "dense":
        return block(scheme, q, k, v, i, j, state)[0]
    return _blocks(scheme, q, k, v, i, j, state, training)


def block(
    scheme: Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    j: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One block of queries by the definition: scores, hooks, mask, softmax, values.

    The T queries are the last T of the S keys. Returns the output (B, H, T, D) and the weights
    (B, H, T, S).
    """
    z = scores(scheme, q, k, i, j, state)  # (B, H, T, S)
    visible = _causal(q.shape[2], k.shape[2], q.device)  # (T, S)
    allowed = scheme.mask(i, j)
    if allowed is not None:
        visible = visible & allowed  # (T, S), (H, T, S) or (B, H, T, S)
    # In place where z is ours alone: what a scheme returned, its backward pass may still need.
    fill = z.masked_fill if scheme.overrides("scores") else z.masked_fill_
    p = scheme.normalize(fill(~visible, -torch.inf)).to(v.dtype)  # (B, H, T, S)
    out = p @ v  # (B, H, T, D)
    extra = scheme.value(p, i, j)
    return (out if extra is None else out + extra), p


def scores(
    scheme: Scheme, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
) -> Tensor:
    """q k^T / sqrt(D) with all that the scheme adds, before the mask. (B, H, T, S)"""
    z = (q * scheme.site.d_head**-0.5) @ k.transpose(-1, -2)  # (B, H, T, S)
    if scheme.overrides("distance_bias") and not scheme.overrides("positions"):
        z = z + _by_distance(scheme, q.shape[2], k.shape[2], q.device)
    elif scheme.overrides("distance_bias"):
        distance = (i[..., :, None] - j[..., None, :]).clamp(min=0)  # (T, S) or (B, T, S)
        bias = scheme.distance_bias(distance)  # (H, T, S) or (H, B, T, S)
        z = z + (bias if bias.ndim == 3 else bias.transpose(0, 1))
    return scheme.scores(z, q, k, i, j, state)


def _mask(scheme: Scheme, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor:
    """All that a fixed scheme adds to scores, -inf at hidden keys: (T, S) to (1 or B, H, T, S)."""
    n_queries, n_keys = i.shape[-1], j.shape[-1]
    if scheme.overrides("distance_bias"):
        bias = _by_distance(scheme, n_queries, n_keys, i.device, -torch.inf).to(dtype)  # (H, T, S)
    else:
        seen = _causal(n_queries, n_keys, i.device)  # (T, S)
        bias = torch.zeros(seen.shape, dtype=dtype, device=i.device).masked_fill_(~seen, -torch.inf)
    allowed = scheme.mask(i, j)
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def _by_distance(
    scheme: Scheme, n_queries: int, n_keys: int, device: torch.device, above: float = 0.0
) -> Tensor:
    """`distance_bias` of the last T of S tokens, evaluated once a distance: (H, T, S).

    above: what stands where a key is later than the query.
    """
    u = _reversed_bias(scheme, n_keys, n_queries, device, above)  # (H, S + T)
    # Queries in reverse order: then rows and columns both advance by one element.
    return u.as_strided((len(u), n_queries, n_keys), (u.stride(0), 1, 1)).flip(1)


def _reversed_bias(
    scheme: Scheme, n_keys: int, n_above: int, device: torch.device, above: float
) -> Tensor:
    """b(S - 1), ..., b(0) and then `above`, n_above times: (H, S + n_above)."""
    distance = torch.arange(n_keys - 1, -1, -1, device=device)
    return F.pad(scheme.distance_bias(distance), (0, n_above), value=above)


def _causal(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """bool (T, S): key s is visible to query t, the queries being the last T keys."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


def _blocks(
    scheme: Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    j: Tensor,
    state: Tensor | None,
    training: bool,
) -> Tensor:
    """`block` over blocks of queries; with a band, each block sees only its keys."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    sinks, window = scheme.band or (0, n_keys)
    seen = min(n_keys, sinks + 2 * window)
    rows = max(1, BLOCK_BYTES // (4 * q.shape[0] * q.shape[1] * seen))
    if scheme.band is not None:
        rows = min(rows, window)
    out = []
    for start in range(n_keys - n_queries, n_keys, rows):
        stop = min(start + rows, n_keys)
        first = max(0, start - window + 1)
        keys = torch.arange(first, stop, device=q.device)
        if first > 0 and sinks > 0:
            keys = torch.cat([torch.arange(min(sinks, first), device=q.device), keys])
        whole = len(keys) == stop  # then slices do, without a copy
        pick = slice(0, stop) if whole else keys
        here = slice(start - (n_keys - n_queries), stop - (n_keys - n_queries))
        arguments = (
            scheme, q[:, :, here], k[:, :, pick], v[:, :, pick], i[..., here], j[..., pick],
            None if state is None else state[:, pick],
        )  # fmt: skip
        if training:  # keep no block's weights for the backward pass
            out.append(checkpoint(block, *arguments, use_reentrant=False)[0])
        else:
            out.append(block(*arguments)[0])
    return torch.cat(out, 2)  # (B, H, T, D)


def _strips(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias b(i - j) without an n x n tensor and without a copy.

    u holds b(S-1), ..., b(0) and then -inf. With the queries in reverse order, the bias of a block
    is a view of u in which rows and columns both advance by one element. Keys whose bias leaves
    them no weight in float32 are skipped, head by head.
    """
    n_heads, n_queries, n_keys = q.shape[1], q.shape[2], k.shape[2]
    rows = min(STRIP_ROWS, n_queries)
    if scheme.overrides("distance_bias"):
        u = _reversed_bias(scheme, n_keys, rows, q.device, -torch.inf)  # (H, S + rows)
        reach = _reach(u[:, :n_keys], q, k, scheme.site.d_head)
    else:
        u = F.pad(torch.zeros(1, n_keys, device=q.device), (0, rows), value=-torch.inf)
        u, reach = u.expand(n_heads, -1), [n_keys] * n_heads
    u = u.to(q.dtype)
    reverse = q.flip(2)  # (B, H, T, D)
    out = torch.empty_like(reverse)
    for start in range(n_keys - n_queries, n_keys, rows):
        stop = min(start + rows, n_keys)
        here = slice(n_keys - stop, n_keys - start)
        firsts = [max(0, start + 1 - far) for far in reach]  # key of each head
        for first, group in groupby(range(n_heads), firsts.__getitem__):
            heads = list(group)
            pick, seen = slice(heads[0], heads[-1] + 1), slice(first, stop)
            strip = u.as_strided(
                (1, len(heads), stop - start, stop - first),
                (0, u.stride(0), 1, 1),
                heads[0] * u.stride(0) + n_keys - stop + first,
            )  # (1, heads, rows, keys)
            out[:, pick, here] = F.scaled_dot_product_attention(
                reverse[:, pick, here], k[:, pick, seen], v[:, pick, seen], attn_mask=strip,
                scale=scheme.site.d_head**-0.5,
            )  # fmt: skip
    return out.flip(2)  # (B, H, T, D)


def _reach(u: Tensor, q: Tensor, k: Tensor, d_head: int) -> list[int]:
    """How many of the nearest keys of each head can have weight at all.

    u: b(S - 1), ..., b(0), (H, S). A score is at most M = |q| |k| / sqrt(D) away from zero, so all
    S keys of a bias below b(0) - 2 M - ln S together weigh less than the query's own key; another
    24 ln 2 below, less than a float32 can add to it. The bound holds whatever the bias' shape.
    """
    most = u.double().cummax(1).values  # of this distance and all farther ones
    norms = (x.double().norm(dim=-1).amax((0, 2)) for x in (q, k))
    bound = 2 * math.prod(norms) * d_head**-0.5 + math.log(u.shape[1]) + 24 * math.log(2)
    return (most >= u[:, -1:] - bound[:, None]).sum(1).tolist()


def _merged(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, state: Tensor | None
) -> Tensor:
    """Blocks of queries: their near keys by the definition, those beyond `reach` by the fused
    kernel, merged by the sums of their exponentials."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    out = []
    for start in range(n_keys - n_queries, n_keys, MERGE_ROWS):
        stop = min(start + MERGE_ROWS, n_keys)
        first = max(0, start - scheme.reach)
        here, near = (
            slice(start - n_keys + n_queries, stop - n_keys + n_queries),
            slice(first, stop),
        )
        own, own_i = q[:, :, here], i[..., here]
        z = scores(
            scheme, own, k[:, :, near], own_i, j[..., near],
            None if state is None else state[:, near],
        )  # (B, H, rows, near keys)  # fmt: skip
        z = z.masked_fill(~_causal(stop - start, stop - first, q.device), -torch.inf)
        near_sum = z.logsumexp(-1, keepdim=True)  # (B, H, rows, 1)
        p = (z - near_sum).exp().to(v.dtype)
        near_out = p @ v[:, :, near]  # (B, H, rows, D)
        extra = scheme.value(p, own_i, j[..., near])
        near_out = near_out if extra is None else near_out + extra
        if first == 0:
            out.append(near_out)
            continue
        before = None if state is None else state[:, :stop]
        by_query, by_key, far_extra = scheme.far(own, own_i, j[..., :first], before)
        mask = None
        if by_key is not None:
            mask = by_key.to(q.dtype).expand(*own.shape[:3], first)  # a stride of 0 over queries
        far_out, far_sum = WITH_LSE(
            own, k[:, :, :first], v[:, :, :first], 0.0, False, attn_mask=mask
        )
        far_sum = far_sum[..., None]  # (B, H, rows, 1)
        far_sum = far_sum if by_query is None else far_sum + by_query
        far_out = far_out if far_extra is None else far_out + far_extra
        share = torch.sigmoid(near_sum - far_sum).to(v.dtype)  # the weight of all near keys
        out.append(torch.lerp(far_out, near_out, share))
    return torch.cat(out, 2)  # (B, H, T, D)


def _folded(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, j: Tensor, state: Tensor | None
) -> Tensor:
    """The bias as extra dimensions of queries and keys.

    v is padded to the same width: the fused kernel takes equal widths only, and the fall-back
    builds n x n. Queries are padded to S: is_causal wants a square. Half precision is raised to
    float32, as bfloat16 would not tell key 1023 from key 1024.
    """
    width, n_queries, dtype = q.shape[-1], q.shape[2], q.dtype
    q = F.pad(q, (0, 0, k.shape[2] - n_queries, 0))  # (B, H, S, D)
    extra_q, extra_k = scheme.fold(j, state)  # (1 or B, H, S, F)
    n_extra = extra_q.shape[-1]
    shape = (*k.shape[:3], n_extra)
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (
        torch.cat([part.to(wide), extra.to(wide).expand(shape)], -1)  # (B, H, S, D + F)
        for part, extra in ((q, extra_q), (k, extra_k))
    )
    v = F.pad(v.to(wide), (0, n_extra))  # (B, H, S, D + F)
    with torch.autocast(q.device.type, enabled=False):  # which would lower them again
        scale = scheme.site.d_head**-0.5
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out[:, :, -n_queries:, :width].to(dtype)  # (B, H, T, D)
