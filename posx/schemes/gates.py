"""Forgetting: every token between a key and the query takes something off the key's score.

    z_ij + c_i - c_j, c running sums of what each token takes    (fox, cable)
    z_ij - (i - j) times a rate that query and key choose        (grape_a)
    z_ij + a sum over the tokens between, chosen by the query    (grape_ap)
    each channel of q_i k_j by itself                            (wall)

Hooks: scores, with the sums as the state of a token from prepare; fold in training, far for keys
far behind in evaluation (fox, cable).

Running sums are float64: at 8192 tokens they reach thousands, and what counts are differences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.errors import UserError
from posx.schemes.base import Scheme, Site
from posx.schemes.bias import alibi_slopes
from posx.schemes.contextual import sum_after, summed, wide, widened
from posx.schemes.relative import distances
from posx.schemes.rotary import rotate


def gate(site: Site, width: int, bias: float = 0.0) -> nn.Linear:
    """The projection of x to `width` gates: small weights, so that it starts at its bias."""
    linear = nn.Linear(site.d_model, width)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.constant_(linear.bias, bias)
    return linear


class Fox(Scheme):
    """z_ij + c_i - c_j, c_t the sum of log sigmoid(w x_s + b) over s <= t: every token multiplies
    the weights of all keys before it by its forget gate.

    Lin et al. 2025 (arXiv:2503.02130), Forgetting Transformer, without its other layers ("Pro") and
    without RoPE, as in the paper. No longest length; keys fade out at the rate that the tokens
    choose, one a head, and a closed gate hides all that lies before it. Gates start at
    sigmoid(bias_init): a token forgets half at 0, as in the authors' code, and one in 150 at 5, as
    in x-transformers' DataDependentAlibi, where copying is learned in fewer steps and reaches
    further. (d_model + 1) n_heads parameters a layer.
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, bias_init: float = 0.0) -> None:
        super().__init__(site)
        self.gate = gate(site, site.n_heads, bias_init)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q, k, v, summed(F.logsigmoid(wide(self.gate, x)).double(), past)  # (B, T, H)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        return z + faded(state, z)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        key = centred(state) * self.site.d_head**0.5  # (B, H, T, 1)
        return torch.ones_like(key), key

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        assert state is not None
        by_query, by_key = faded_far(state, q, j)
        return by_query, by_key, None


def faded(c: Tensor | None, z: Tensor) -> Tensor:
    """c_i - c_j of the last T of S tokens, in z's precision, or float32.

    c: (B, S, H), z: (B, H, T, S) -> (B, H, T, S)
    """
    assert c is not None
    c = c.mT  # (B, H, S)
    return (c[:, :, -z.shape[2] :, None] - c[:, :, None]).to(widened(z).dtype)


def faded_far(c: Tensor, q: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """c_i - c_e and c_e - c_j, e the last of the far keys j: small where weights are not.

    c: (B, N, H) of all keys so far, q: (B, H, T, D) -> (B, H, T, 1) and (B, H, 1, S)
    """
    c, n_far, dtype = c.mT, j.shape[-1], widened(q).dtype  # (B, H, N)
    last = c[:, :, n_far - 1 : n_far]  # (B, H, 1)
    by_query, by_key = c[:, :, -q.shape[2] :] - last, last - c[:, :, :n_far]
    return by_query.to(dtype)[..., None], by_key.to(dtype)[:, :, None]


def centred(c: Tensor | None) -> Tensor:
    """-c_j up to a constant, as small as possible: the dot product of a fold rounds it.

    c: (B, T, H) -> (B, H, T, 1)
    """
    assert c is not None
    return ((c[:, :1] + c[:, -1:]) / 2 - c).mT[..., None]


INCREMENTS = {"relu": F.relu, "softplus": F.softplus}


class Cable(Scheme):
    """z_ij + s_i (c_i - c_j), c_t = -sum of relu(w x_s + b) over s <= t, s_i = softplus(u x_i + a):
    every token pushes the keys before it further away, and the query says how much that counts.
    (unverified: that the paper's formula is that of the released models)

    Veisi et al. 2025 (arXiv:2503.08067). The default is the form of the authors' released models
    (their "cable6"). Their first release, here cable_first, has increments=softplus, no s_i
    (weighted=false) and no 1 / sqrt(D) on q k (scaled=false); with it, it would be FoX, since
    -softplus(a) = log sigmoid(-a). A later variant passes the bias through a logarithm. No longest
    length; keys fade out at the rate that the tokens choose, and with relu a token may take nothing
    at all. 2 (d_model + 1) n_heads parameters a layer, half without s_i.
    """

    enters = "score"
    relative = True

    def __init__(
        self,
        site: Site,
        increments: str = "relu",
        weighted: bool = True,
        scaled: bool = True,
    ) -> None:
        super().__init__(site)
        if increments not in INCREMENTS:
            raise UserError(f"cable: increments is {increments!r}; use {' or '.join(INCREMENTS)}")
        self.increments, self.scaled = increments, scaled
        self.step = gate(site, site.n_heads)
        self.weight = gate(site, site.n_heads) if weighted else None

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        steps = INCREMENTS[self.increments](wide(self.step, x)).double()  # (B, T, H)
        c = summed(-steps, None if past is None else past[..., : self.site.n_heads])
        q = q if self.scaled else q * self.site.d_head**0.5
        if self.weight is not None:
            c = torch.cat([c, F.softplus(wide(self.weight, x)).double()], -1)  # (B, T, 2 H)
        return q, k, v, c

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        c, s = self._parts(state)
        bias = faded(c, z)
        return z + bias if s is None else torch.addcmul(z, s[:, :, -z.shape[2] :].to(bias), bias)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        c, s = self._parts(state)
        key = centred(c) * self.site.d_head**0.5  # (B, H, T, 1)
        return torch.ones_like(key) if s is None else s, key

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As FoX; with s_i the term of a key is one of the query, too: (B, H, T, S)."""
        c, s = self._parts(state)
        by_query, by_key = faded_far(c, q, j)
        if s is not None:
            s = s[:, :, -q.shape[2] :].to(by_key)  # (B, H, T, 1)
            by_query, by_key = by_query * s, by_key * s
        return by_query, by_key, None

    def _parts(self, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """c: (B, S, H), and s: (B, H, S, 1) or None."""
        assert state is not None
        c, s = state.split([self.site.n_heads, state.shape[-1] - self.site.n_heads], -1)
        return c, None if self.weight is None else s.mT[..., None]


GATED = ("query_key", "key", "query")


class GrapeA(Scheme):
    """z_ij - (i - j) w_h (softplus(a_h q_i / sqrt(D)) + softplus(b_h k_j / sqrt(D))): ALiBi whose
    slope the query and the key choose.

    Zhang et al. 2025 (arXiv:2512.07805), GRAPE-A, eq. 4.6; gated=key and gated=query keep one of
    the two terms. a_h and b_h are scaled to length 1, and w_h = softplus(t_h) m_h with ALiBi's
    slope m_h and softplus(t_h) = 1 at the start, as in the authors' code. There q and k of each
    head have passed an RMS norm first, which is no part of the scheme. No longest length; far keys
    fade out. n_heads (2 d_head + 1) parameters a layer with both gates.
    """

    enters = "score"
    relative = True
    slopes: Tensor

    def __init__(self, site: Site, gated: str = "query_key") -> None:
        super().__init__(site)
        if gated not in GATED:
            raise UserError(f"grape_a: gated is {gated!r}; use {', '.join(GATED)}")
        slopes = torch.tensor(alibi_slopes(site.n_heads), dtype=torch.float64)
        self.constant("slopes", slopes)  # (H,)
        one = torch.ones(site.n_heads).expm1().log()  # softplus of it is 1
        self.rate = nn.Parameter(one)  # t
        self.query, self.key = (
            nn.Parameter(torch.randn(site.n_heads, site.d_head) * site.d_head**-0.5)
            if side in gated.split("_")
            else None
            for side in ("query", "key")
        )

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        rate = F.softplus(self.rate.to(self.slopes)) * self.slopes  # (H,)
        slope = self._gate(q, self.query)[..., None] + self._gate(k, self.key)[:, :, None]
        d = distances(i, j).to(slope)  # (1, T, S)
        return torch.addcmul(z.to(slope), d, slope * -rate.view(-1, 1, 1))

    def _gate(self, x: Tensor, direction: Tensor | None) -> Tensor:
        """softplus(a_h x / sqrt(D)) in float32 or more, 0 where there is no gate. -> (B, H, T)"""
        x = widened(x)
        if direction is None:
            return x.new_zeros(1, 1, 1)
        direction = F.normalize(direction.to(x), dim=-1)[:, None]  # (H, 1, D)
        return F.softplus((x * direction).sum(-1) * x.shape[-1] ** -0.5)


class GrapeAP(Scheme):
    """z_ij + m_h sum of log sigmoid(p_i R(t) p_t / P) over j < t <= i, p = rms_norm(W x) of width P
    a head: what a token takes off the keys before it depends on which query looks.

    Zhang et al. 2025 (arXiv:2512.07805), GRAPE-AP, eq. 5.1 and 5.2, with ALiBi's slopes m_h and
    P = 8 as in the authors' code. R(t) turns every pair of p_t by t radians, but not p_i, so the
    positions themselves count, to a period of 2 pi. norm_query=false leaves p_i without its norm,
    as the authors' code does. No longest length; with both norms a token takes 0.31 m_h to 1.31 m_h
    off the keys before it. d_model n_heads P parameters a layer.
    """

    enters = "score"
    slopes: Tensor

    def __init__(self, site: Site, width: int = 8, norm_query: bool = True) -> None:
        super().__init__(site)
        if width < 2 or width % 2:
            raise UserError(f"grape_ap: width is {width}; it must be even, to turn in pairs")
        self.norm_query = norm_query
        slopes = torch.tensor(alibi_slopes(site.n_heads), dtype=torch.float64)
        self.constant("slopes", slopes)  # (H,)
        self.project = nn.Linear(site.d_model, site.n_heads * width, bias=False)
        nn.init.normal_(self.project.weight, std=site.d_model**-0.5)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        p = wide(self.project, x).unflatten(-1, (self.site.n_heads, -1)).transpose(1, 2)
        unit = F.rms_norm(p, p.shape[-1:])  # (B, H, T, P)
        angle = pos.to(unit)[..., None].expand(*pos.shape, p.shape[-1] // 2)  # (T, P / 2)
        turned = rotate(unit, angle.cos(), angle.sin(), interleaved=False)
        asks = unit if self.norm_query else p
        return q, k, v, torch.cat([asks, turned], -1).transpose(1, 2)  # (B, T, H, 2 P)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        asks, turned = state.transpose(1, 2).chunk(2, -1)  # (B, H, S, P)
        with torch.autocast(z.device.type, enabled=False):
            edges = asks[:, :, -z.shape[2] :] @ turned.mT * asks.shape[-1] ** -1.0
        edges = F.logsigmoid(edges).tril(z.shape[3] - z.shape[2])  # (B, H, T, S)
        return z + sum_after(F.pad(edges[..., 1:], (0, 1))) * self.slopes.view(-1, 1, 1)


LEAF = 8  # queries and keys that meet channel by channel


class Wall(Scheme):
    """z_ij = sum over channels n of q_in k_jn exp(c_in - c_jn) / sqrt(D), c_tn the sum of
    log sigmoid(w_n x_s + b_n) over s <= t: each channel of a key fades at a rate of its own.

    Tilde Research 2026, no paper: https://blog.tilderesearch.com/blog/wall-attn, and in
    https://github.com/fla-org/flash-linear-attention. FoX subtracts from a score, this multiplies
    parts of it: a forgotten key has score 0, and its weight is that of a key that says nothing.
    No longest length. b_n starts at bias_init, 8 in fla: gates of 0.9997, almost no position. fla
    can add FoX's gate on top, which is left out. d (d_model + 1) parameters a layer,
    d = n_heads d_head.
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site, bias_init: float = 8.0) -> None:
        super().__init__(site)
        self.gate = gate(site, site.n_heads * site.d_head, bias_init)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q, k, v, summed(F.logsigmoid(wide(self.gate, x)).double(), past)  # (B, T, H D)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        c = state.unflatten(-1, (self.site.n_heads, -1)).transpose(1, 2)  # (B, H, S, D)
        with torch.autocast(z.device.type, enabled=False):
            q, k = widened(q), widened(k)
            plain = q @ k.mT  # z may hold more than this
            return z + (channel_scores(q, k, c) - plain) * self.site.d_head**-0.5


def channel_scores(q: Tensor, k: Tensor, c: Tensor) -> Tensor:
    """sum of q_in k_jn exp(c_in - c_jn) of the last T of S tokens; finite where j > i.

    q: (B, H, T, D); k, c: (B, H, S, D), c falls with the position -> (B, H, T, S), like q.

    exp(c_i) and exp(-c_j) leave the range of floats. So keys before the first query r meet the
    queries as k_j exp(c_r - c_j) and q_i exp(c_i - c_r): both factors are at most 1, and where one
    is too small for a float, so is the product. The rest is halved until few queries are left.
    """
    n_queries = q.shape[2]
    start = k.shape[2] - n_queries
    if start > 0:
        first = c[:, :, start : start + 1]  # (B, H, 1, D)
        queries = q * (c[:, :, start:] - first).to(q.dtype).exp()
        keys = k[:, :, :start] * (first - c[:, :, :start]).to(q.dtype).exp()
        own = channel_scores(q, k[:, :, start:], c[:, :, start:])
        return torch.cat([queries @ keys.mT, own], -1)
    if n_queries > LEAF:
        half = n_queries // 2
        upper = channel_scores(q[:, :, :half], k[:, :, :half], c[:, :, :half])
        lower = channel_scores(q[:, :, half:], k, c)
        return torch.cat([F.pad(upper, (0, n_queries - half)), lower], 2)
    apart = (c[:, :, :, None] - c[:, :, None]).to(q.dtype).clamp(max=0)  # (B, H, T, T, D)
    return (q[:, :, :, None] * k[:, :, None] * apart.exp()).sum(-1)
