"""Relative vectors: what a query and a key say to their distance, not only to one another.

    z_ij = q_i (k_j + a[i - j]) / sqrt(D)        hook: scores; a vector for each distance

Some have the vectors on the key side, some on both sides, some on the values too (hook: value).
The few distinct vectors are multiplied once and then spread over the keys, so nothing of size
T x S x D is built.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.absolute import sinusoids
from posx.schemes.base import Scheme, Site


def distances(i: Tensor, j: Tensor) -> Tensor:
    """i - j of each pair, 0 where the key comes later: attention masks those.

    -> (1, T, S), or (B, 1, T, S) from positions of shape (B, T).
    """
    return (i[..., :, None] - j[..., None, :]).clamp_(min=0).unsqueeze(-3)


def spread(table: Tensor, rows: Tensor) -> Tensor:
    """Read table[t, rows[t, s]]. table: (B, H, T, R), rows: (1 or B, 1, T, S) -> (B, H, T, S)."""
    return table.gather(-1, rows.expand(*table.shape[:-1], rows.shape[-1]))


class Shaw(Scheme):
    """z_ij = q_i (k_j + a_K[c]) / sqrt(D), out_i = sum_j p_ij (v_j + a_V[c]), c = clip(j - i).

    Shaw et al. 2018 (arXiv:1803.02155). Offsets are clipped to -k .. k, so a_K and a_V are tables
    of 2k + 1 rows; they belong to a layer and are shared by its heads.
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
        self.k = self.reach = k
        self.keys = nn.Parameter(torch.empty(2 * k + 1, site.d_head))
        nn.init.normal_(self.keys, std=init_std)
        self.values: nn.Parameter | None = None
        if not on_values:
            self.enters = "score"
        else:
            self.values = nn.Parameter(torch.empty(2 * k + 1, site.d_head))
            nn.init.normal_(self.values, std=init_std)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        past = self.keys[: self.k + 1]  # (k + 1, D)
        offset = q @ past.T * self.site.d_head**-0.5  # (B, H, T, k + 1)
        return z + spread(offset, self._rows(i, j))

    def value(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        if self.values is None:
            return None
        past = self.values[: self.k + 1]  # (k + 1, D)
        weight = p.new_zeros(*p.shape[:-1], self.k + 1)  # (B, H, T, k + 1)
        weight = weight.scatter_add(-1, self._rows(i, j).expand(p.shape), p)
        return weight @ past

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Row 0 for every key: a constant of the query, and one vector whatever the weights."""
        offset = (q @ self.keys[0])[..., None] * self.site.d_head**-0.5  # (B, H, T, 1)
        return offset, None, None if self.values is None else self.values[0]

    def _rows(self, i: Tensor, j: Tensor) -> Tensor:
        """clip(j - i, -k, 0) + k, the row of each pair -> (1 or B, 1, T, S)."""
        return self.k - distances(i, j).clamp_(max=self.k)


class TransformerXL(Scheme):
    """z_ij = ((q_i + u) k_j + (q_i + v) W R[i - j]) / sqrt(D), R[d] the sinusoids of d, E wide.

    Dai et al. 2019 (arXiv:1901.02860). W projects R to keys, u and v are trained queries that ask
    for content and for distance whatever the token. No longest length; beyond the training length
    the slow sinusoids reach phases that the model has never seen. d_model n_heads d_head + 2
    n_heads d_head parameters a layer: the paper has one u and one v for all layers, its code and
    XLNet can have either. Its [sin | cos] columns are interleaved here, which W undoes. O(T S).
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, base: float = 10000.0, init_std: float = 0.1) -> None:
        super().__init__(site)
        if base <= 1:
            raise UserError(f"txl: base is {base}; it must be above 1, the paper has 10000")
        self.base = base
        self.weight = nn.Parameter(torch.empty(site.n_heads, site.d_head, site.d_model))
        self.content = nn.Parameter(torch.empty(site.n_heads, site.d_head))  # u
        self.distance = nn.Parameter(torch.empty(site.n_heads, site.d_head))  # v
        for parameter in (self.weight, self.content, self.distance):
            nn.init.normal_(parameter, std=init_std)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        d = distances(i, j)  # (1, T, S)
        query = q + self.distance[:, None]  # (B, H, T, D)
        keys = self._keys(int(d.max()) + 1).to(query.dtype)  # (H, D, R)
        added = self.content[:, None] @ k.mT + spread(query @ keys, d)  # (B, H, T, S)
        return z + added * self.site.d_head**-0.5

    def _keys(self, count: int) -> Tensor:
        """W R[d] of the distances below `count` -> (H, D, count), in float32 or more."""
        d = torch.arange(count, device=self.weight.device)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        table = sinusoids(d, self.site.d_model, self.base, -1).to(wide)  # (count, E)
        with torch.autocast(d.device.type, enabled=False):  # which would round the sinusoids
            return self.weight.to(wide) @ table.T


BEYOND = ("error", "clip", "zero")


class MusicShaw(Scheme):
    """z_ij = q_i (k_j + a[i - j]) / sqrt(D), a table of max_len rows a head (None: train_len).

    Huang et al. 2018 (arXiv:1809.04281): Shaw et al. without clipping, on the keys alone, each head
    with its own table. The paper's table is as long as the sequence; what a distance beyond it does
    is `beyond`: error, clip (it reads the row of the longest distance of training) or zero (it adds
    nothing, as in the authors' tensor2tensor). max_len n_heads d_head parameters a layer. O(T S).
    """

    enters = "score"
    relative = True

    def __init__(
        self,
        site: Site,
        max_len: int | None = None,
        beyond: str = "error",
        init_std: float = 0.1,
    ) -> None:
        super().__init__(site)
        rows = site.train_len if max_len is None else max_len
        if rows < 1:
            raise UserError(f"music_shaw: max_len is {rows}; it must be at least 1")
        if beyond not in BEYOND:
            raise UserError(f"music_shaw: beyond is {beyond!r}; use {', '.join(BEYOND)}")
        self.beyond = beyond
        self.max_len = rows if beyond == "error" else None
        self.table = nn.Parameter(torch.empty(site.n_heads, rows, site.d_head))
        nn.init.normal_(self.table, std=init_std)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        d, rows = distances(i, j), self.table.shape[1]
        added = q @ self.table.transpose(-1, -2) * self.site.d_head**-0.5  # (B, H, T, rows)
        if self.beyond == "clip":
            d = d.clamp_(max=min(rows, self.site.positions) - 1)
        elif self.beyond == "zero":
            added = F.pad(added, (0, 1))  # (B, H, T, rows + 1)
            d = d.clamp_(max=rows)
        elif d.max() >= rows:
            raise UserError(
                f"music_shaw: distance {int(d.max())} is beyond max_len {rows}, the table has no "
                "row for it: train with scheme.beyond=clip or scheme.beyond=zero, or with a larger "
                "scheme.max_len"
            )
        return z + spread(added, d)


class InklingRel(Scheme):
    """z_ij + r_i P[i - j], r_i = W x_i of width d_rel a head, P a bank of `extent` vectors.

    Thinking Machines 2026, no paper: the attention of Inkling in
    https://github.com/huggingface/transformers. What the token holds mixes d_rel curves over the
    distance, which all heads share, into the bias of its row; not divided by sqrt(D). Zero at
    distances from `extent` on (None: the training length; Inkling has 1024), so far keys have no
    position. d_model n_heads d_rel + d_rel extent parameters a layer. Inkling also scales its
    scores by a logarithm of the length, which is left out here. O(T S).
    """

    enters = "score"
    relative = True

    def __init__(
        self, site: Site, d_rel: int = 16, extent: int | None = None, init_std: float = 0.02
    ) -> None:
        super().__init__(site)
        columns = site.positions if extent is None else extent
        if d_rel < 1 or columns < 1:
            raise UserError(
                f"inkling_rel: d_rel {d_rel} and extent {columns}; both must be at least 1, "
                "Inkling has 16 and 1024"
            )
        self.project = nn.Linear(site.d_model, site.n_heads * d_rel, bias=False)
        nn.init.normal_(self.project.weight, std=site.d_model**-0.5)
        self.bank = nn.Parameter(torch.empty(d_rel, columns))
        nn.init.normal_(self.bank, std=init_std)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q, k, v, self.project(x).unflatten(-1, (self.site.n_heads, -1))  # (B, T, H, d_rel)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        mix = state[:, -q.shape[2] :].transpose(1, 2)  # (B, H, T, d_rel)
        curves = F.pad(mix @ self.bank, (0, 1))  # (B, H, T, extent + 1)
        return z + spread(curves, distances(i, j).clamp_(max=self.bank.shape[1]))


def log_bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance of every DeBERTa bucket 0 .. buckets.

    With m = buckets / 2, distances up to m have a bucket each. The bucket of a longer d is
    m + ceil((m - 1) ln(d / m) / ln(M / m)), M = max_distance - 1. Number m + c starts at the
    smallest d with d^(m-1) m^(c-1) > m^(m-1) M^(c-1): whole numbers, so that no logarithm rounds
    across an edge.
    """
    m, last = buckets // 2, max_distance - 1
    starts, d = list(range(m + 1)), m + 1
    for c in range(1, buckets - m + 1):
        while d ** (m - 1) * m ** (c - 1) <= m ** (m - 1) * last ** (c - 1):
            d += 1
        starts.append(d)
    return starts


class DebertaRel(Scheme):
    """z_ij = (q_i k_j + q_i K[b] + k_j Q[-b]) / sqrt(3 D), b = clip(i - j, -k, k - 1).

    He et al. 2020 (arXiv:2006.03654), in a causal decoder. Content asks for position and position
    for content: K = P W_K and Q = P W_Q, with P a table of 2k rows. All distances of k and more
    share a row, at any length. k is `buckets` (None: the longest distance of training, at most the
    paper's 512). With log=true, buckets (None: half of the training length, an even number, at most
    256) widen from half of them on, up to max_distance (None: the longest of training), as in v2.
    same_row=true reads Q[b] instead of Q[-b], as the authors' code and transformers do. 2k d_model
    + 2 d_model n_heads d_head parameters a layer; the paper has one P for all layers. O(T S).
    """

    enters = "score"
    relative = True
    starts: Tensor

    def __init__(
        self,
        site: Site,
        buckets: int | None = None,
        log: bool = False,
        max_distance: int | None = None,
        same_row: bool = False,
        init_std: float = 0.3,
    ) -> None:
        super().__init__(site)
        longest = max(2, site.positions - 1)
        if max_distance is not None:
            longest = max_distance
            if not log:
                raise UserError("deberta_rel: max_distance needs log=true, which buckets up to it")
        if buckets is None:
            half = max(4, site.positions // 4 * 2)
            buckets = min(256, half) if log else min(512, longest)
        if buckets < (4 if log else 2) or (log and longest < buckets):
            raise UserError(
                f"deberta_rel: buckets {buckets} and max_distance {longest}; use at least 2 "
                "buckets, and with log=true at least 4 and no more than max_distance"
            )
        starts = log_bucket_starts(buckets, longest) if log else list(range(buckets + 1))
        self.register_buffer("starts", torch.tensor(starts), persistent=False)
        self.same_row = same_row
        self.table = nn.Parameter(torch.empty(2 * buckets, site.d_model))
        nn.init.normal_(self.table, std=init_std)
        width = site.n_heads * site.d_head
        self.key = nn.Linear(site.d_model, width, bias=False)
        self.query = nn.Linear(site.d_model, width, bias=False)
        for linear in (self.key, self.query):
            nn.init.normal_(linear.weight, std=site.d_model**-0.5)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        scale = (3 * self.site.d_head) ** -0.5
        half = len(self.table) // 2
        after = torch.cat([self.table[half:], self.table[-1:]])  # rows of b = 0 .. k: (k + 1, E)
        before = self.table[: half + 1].flip(0)  # rows of -b
        to_key = q @ self._heads(self.key(after)) * scale  # (B, H, T, k + 1)
        to_query = self._heads(self.query(after if self.same_row else before))
        to_query = k @ to_query * scale  # (B, H, S, k + 1)
        bucket = self.bucket(distances(i, j))  # (1, T, S)
        z = z * 3**-0.5
        z += spread(to_key, bucket)  # in place: these tensors are the largest
        z += spread(to_query, bucket.mT).mT
        return z

    def bucket(self, d: Tensor) -> Tensor:
        """The bucket of each distance d >= 0, at most k; same shape, int64."""
        return torch.searchsorted(self.starts[1:], d, right=True)

    def _heads(self, rows: Tensor) -> Tensor:
        """(R, H D) -> (H, D, R)."""
        return rows.unflatten(-1, (self.site.n_heads, -1)).permute(1, 2, 0)


class Tupe(Scheme):
    """z_ij = (q_i k_j + (p_i U_Q) (p_j U_K)) / sqrt(2 D), p the rows of a trained table.

    Ke et al. 2020 (arXiv:2006.15595), TUPE-A: content and position meet their own kind only. One
    table and one U_Q, U_K for all layers. A position beyond the table's max_len rows (None: the
    training length) is an error. max_len d_model + 2 d_model n_heads d_head parameters once.
    norm=true puts a layer norm on p, as the authors' code does, which also gives U_Q and U_K a
    bias. Their untied [CLS] has no use in a decoder.
    """

    enters = "score"
    shared = True

    def __init__(
        self,
        site: Site,
        max_len: int | None = None,
        norm: bool = False,
        init_std: float = 0.3,
    ) -> None:
        super().__init__(site)
        rows = site.train_len if max_len is None else max_len
        if rows < 1:
            raise UserError(f"tupe: max_len is {rows}; it must be at least 1")
        self.max_len = rows
        self.table = nn.Parameter(torch.empty(rows, site.d_model))
        nn.init.normal_(self.table, std=init_std)
        self.norm = nn.LayerNorm(site.d_model) if norm else nn.Identity()
        width = site.n_heads * site.d_head
        self.query = nn.Linear(site.d_model, width, bias=False)
        self.key = nn.Linear(site.d_model, width, bias=False)
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=site.d_model**-0.5)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        query, key = self._place(self.query, i), self._place(self.key, j)
        added = query @ key.transpose(-1, -2) * self.site.d_head**-0.5  # (1 or B, H, T, S)
        return (z + added) * 2**-0.5

    def _place(self, linear: nn.Linear, pos: Tensor) -> Tensor:
        """p U of every head. pos: (T,) or (B, T) -> (H, T, D) or (B, H, T, D)."""
        length, rows = int(pos.max()) + 1, len(self.table)
        if length > rows:
            raise UserError(
                f"tupe: length {length} is beyond max_len {rows}, the table has no row for "
                f"position {length - 1}: train with scheme.max_len={length}"
            )
        placed = linear(self.norm(self.table[pos]))  # (T, H D)
        return placed.unflatten(-1, (self.site.n_heads, -1)).transpose(-3, -2)
