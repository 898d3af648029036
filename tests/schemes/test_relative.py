"""Relative vectors against loops over pairs and other people's code."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import SITE, B, D, E, H, S, T, close, golden
from torch.utils._python_dispatch import TorchDispatchMode

from posx.attention import block
from posx.errors import UserError
from posx.schemes.absolute import sinusoids
from posx.schemes.base import Site
from posx.schemes.relative import (
    DebertaRel,
    InklingRel,
    MusicShaw,
    Shaw,
    TransformerXL,
    Tupe,
    distances,
    log_bucket_starts,
)


def shaw_by_loops(scheme, q, p, i, j):
    """Added scores (B, H, T, S) and outputs (B, H, T, D), key by key, in float64."""
    keys, values = scheme.keys.detach().double(), scheme.values.detach().double()
    z = torch.zeros(B, H, len(i), len(j), dtype=torch.float64)
    out = torch.zeros(B, H, len(i), D, dtype=torch.float64)
    for t in range(len(i)):
        for s in range(len(j)):
            row = max(-scheme.k, min(scheme.k, int(j[s] - i[t]))) + scheme.k
            z[:, :, t, s] = q[:, :, t].double() @ keys[row] / math.sqrt(D)
            out[:, :, t] += p[:, :, t, s, None].double() * values[row]
    return z, out


@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("first", [0, 70])
def test_shaw_equals_loops(k, n_queries, first):
    scheme = Shaw(SITE, k=k, init_std=1.0)
    j = torch.arange(first, first + S)
    i = j[-n_queries:]
    visible = j <= i[:, None]  # (T, S)
    q = torch.randn(B, H, n_queries, D)
    z = torch.randn(B, H, n_queries, S)
    p = z.masked_fill(~visible, -torch.inf).softmax(-1)
    added, out = shaw_by_loops(scheme, q, p, i, j)
    got = scheme.scores(z, q, torch.randn(B, H, S, D), i, j, None)
    assert got.isfinite().all()
    # float32 sums of D = 8 products near 1
    close(torch.where(visible, got - z, 0), torch.where(visible, added, 0), atol=5e-6)
    close(scheme.value(p, i, j), out, atol=5e-6)


def test_shaw_rows_and_clipping():
    scheme = Shaw(SITE, k=3)
    assert scheme.keys.shape == scheme.values.shape == (7, D)
    pos = torch.arange(S)
    q = torch.ones(1, 1, S, D)
    last = scheme.scores(torch.zeros(1, 1, S, S), q, q, pos, pos, None)[0, 0, -1]
    far, near = last[: S - 3], last[S - 3 :]  # distances 8 .. 3 and 2, 1, 0
    assert (far == far[0]).all()
    assert len({x.item() for x in (far[0], *near)}) == 4
    wide = Shaw(Site(E, H, 500, 16), k=20, init_std=0.3)
    for table in (wide.keys, wide.values):
        assert table.std().item() == pytest.approx(0.3, rel=0.03)  # 20500 draws: 0.5 %


def test_shaw_gradients_reach_the_rows_that_causality_reads():
    scheme = Shaw(SITE, k=3)
    pos = torch.arange(S)
    q, z = torch.randn(B, H, S, D), torch.zeros(B, H, S, S)
    scores = scheme.scores(z, q, q, pos, pos, None)
    p = scores.masked_fill(pos > pos[:, None], -torch.inf).softmax(-1)
    scheme.value(p, pos, pos).square().sum().backward()
    for table in (scheme.keys, scheme.values):
        used = table.grad.abs().sum(-1) > 0
        assert used.tolist() == [True] * 4 + [False] * 3


def test_shaw_keys_only():
    scheme = Shaw(SITE, k=3, on_values=False)
    assert [n for n, _ in scheme.named_parameters()] == ["keys"]
    assert scheme.value(torch.ones(B, H, T, T), torch.arange(T), torch.arange(T)) is None
    with pytest.raises(UserError, match="k is 0"):
        Shaw(SITE, k=0)


def test_shaw_keys_equal_wav2vec2_bert():
    theirs = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    scheme = Shaw(SITE, k=3, on_values=False, init_std=1.0)
    module = SimpleNamespace(
        left_max_position_embeddings=3,
        right_max_position_embeddings=3,
        distance_embedding=lambda rows: scheme.keys[rows],
        scaling=D**-0.5,
    )
    pos = torch.arange(S)
    q, k, z = torch.randn(B, H, S, D), torch.randn(B, H, S, D), torch.randn(B, H, S, S)
    want = theirs._apply_relative_key_position_encoding(module, q, k)[1]
    got = scheme.scores(z, q, k, pos, pos, None) - z
    past = pos <= pos[:, None]
    close(torch.where(past, got, 0), torch.where(past, want, 0), atol=5e-6)  # 8 products near 1


# -- what the loops share ------------------------------------------------------------------------

FAR = torch.tensor([0, 3, 4, 9, 11, 20, 21, 40, 70])  # sorted positions that are not contiguous
POSITIONS = {
    "first": torch.arange(S),
    "moved": torch.arange(70, 70 + S),
    "drawn": torch.stack([FAR, torch.arange(5, 5 + S)]),  # one row a sequence: (B, S)
}


def inputs(n_queries):
    """z (B, H, T, S), q (B, H, T, D) and k (B, H, S, D) in float32."""
    q, k = torch.randn(B, H, n_queries, D), torch.randn(B, H, S, D)
    return q @ k.mT / math.sqrt(D), q, k


def by_pairs(score, q, k, pos):
    """Scores (B, H, T, S), pair by pair in float64; 0 where the key comes later.

    score(q_i, k_j, i, j, b, h, t) with q_i, k_j of width D, t the query's place in S.
    """
    n_queries = q.shape[2]
    pos = pos.expand(B, S)
    out = torch.zeros(B, H, n_queries, S, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for row, t in enumerate(range(S - n_queries, S)):
                for s in range(t + 1):
                    i, j = int(pos[b, t]), int(pos[b, s])
                    pair = q[b, h, row].double(), k[b, h, s].double()
                    out[b, h, row, s] = score(*pair, i, j, b, h, t)
    return out


def check(scheme, score, pos, n_queries=T, state=None, atol=5e-6):
    """The scheme's scores of visible keys equal those of the loop, which also has q k.

    atol: float32 sums of some 10 products near 1.
    """
    z, q, k = inputs(n_queries)
    i = pos[..., -n_queries:]
    got = scheme.scores(z, q, k, i, pos, state)
    assert got.isfinite().all()
    visible = torch.ones(n_queries, S, dtype=torch.bool).tril(S - n_queries)
    close(torch.where(visible, got, 0), by_pairs(score, q, k, pos), atol=atol)


each_position = pytest.mark.parametrize("pos", POSITIONS.values(), ids=POSITIONS)


def test_distances_of_later_keys_are_zero():
    d = distances(torch.tensor([7, 9]), torch.tensor([2, 7, 9]))
    assert d.tolist() == [[[5, 0, 0], [7, 2, 0]]]
    assert distances(POSITIONS["drawn"][:, -T:], POSITIONS["drawn"]).shape == (B, 1, T, S)


# -- Transformer-XL ------------------------------------------------------------------------------


def sinusoid(d, base=10000.0):
    """R[d], interleaved, in float64."""
    angles = [d * base ** (-2 * c / E) for c in range(E // 2)]
    return torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)


@each_position
@pytest.mark.parametrize("n_queries", [1, T, S])
def test_txl_equals_loops(pos, n_queries):
    scheme = TransformerXL(SITE, base=100.0)
    weight, u, v = (p.detach().double() for p in (scheme.weight, scheme.content, scheme.distance))

    def score(q, k, i, j, b, h, t):
        key = weight[h] @ sinusoid(i - j, 100.0)
        return ((q + u[h]) @ k + (q + v[h]) @ key) / math.sqrt(D)

    check(scheme, score, pos, n_queries)


def test_txl_golden():
    values = golden("transformer_xl")
    q, k, v = (torch.tensor(values[x]).double() for x in ("q (T,H,d)", "k", "v"))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, 2, 5, 4)
    site = Site(d_model=8, n_heads=2, d_head=4, train_len=16)
    scheme = TransformerXL(site).double()
    table = sinusoids(torch.arange(5, -1, -1), 8, 10000.0, -1)  # distances 5 .. 0: (6, 8)
    sin_cos = torch.cat([table[:, 0::2], table[:, 1::2]], -1)
    close(sin_cos, values["R (rows,d_model) sin|cos"], atol=1e-6)  # theirs is float32
    # The file has keys of distances, not the projection: find one that makes them.
    keys = torch.tensor(values["k_r (rows,H,d)"]).double()  # (6, 2, 4)
    weight = torch.linalg.pinv(table) @ keys.flatten(1)  # (8, 2 * 4)
    close((table @ weight).view(6, 2, 4), keys, atol=1e-9)
    with torch.no_grad():
        scheme.weight.copy_(weight.view(8, 2, 4).permute(1, 2, 0))
        scheme.content.copy_(torch.tensor(values["u=r_w_bias"]))
        scheme.distance.copy_(torch.tensor(values["v_bias=r_r_bias"]))
    pos = torch.arange(5)
    z = q @ k.mT * 0.5
    got = scheme.scores(z, q, k, pos, pos, None)[0]  # (2, 5, 5)
    want = (torch.tensor(values["AC"]) + torch.tensor(values["BD_shifted"])) * 0.5
    close(got.tril(), want.tril(), atol=1e-5)
    out, _ = block(scheme, q, k, v, pos, pos, None)
    close(out[0].transpose(0, 1), values["out"], atol=1e-5)


def test_txl_equals_xlnet():
    """The last T tokens see S keys, as with a memory of S - T."""
    theirs = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = theirs.XLNetConfig(d_model=E, n_head=H, d_inner=4, n_layer=1, attn_type="uni")
    config.d_head = D  # theirs divides E by H, which is 8 here as well
    attention = theirs.XLNetRelativeAttention(config).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    r = theirs.XLNetModel(config).relative_positional_encoding(T, S)[:, 0]  # (S + 1, E)
    scheme = TransformerXL(SITE)
    with torch.no_grad():
        order = torch.arange(E).view(2, -1).T.flatten()  # [sin | cos] to pairs
        scheme.weight.copy_(attention.r[order].permute(1, 2, 0))
        scheme.content.copy_(attention.r_w_bias)
        scheme.distance.copy_(attention.r_r_bias)
    _, q, k = inputs(T)
    v = torch.randn(B, H, S, D)
    keys = torch.einsum("rh,hnd->rnd", r, attention.r)[:, None].expand(-1, B, -1, -1)
    later = ~torch.ones(T, S, dtype=torch.bool).tril(S - T)
    want = attention.rel_attn_core(
        *(x.permute(2, 0, 1, 3) for x in (q, k, v)),
        keys,
        attn_mask=later.float()[..., None, None].expand(-1, -1, B, H),
    )
    pos = torch.arange(S)
    got, _ = block(scheme, q, k, v, pos[-T:], pos, None)
    # their sinusoids are float32: angles up to S are off by 1e-6, in scores of some 10
    close(got.permute(2, 0, 1, 3), want.detach(), atol=2e-5)


def test_txl_sinusoids_are_exact_in_half_precision():
    """The keys of distances are products of float32 sinusoids, also in a bfloat16 model."""
    scheme = TransformerXL(SITE).to(torch.bfloat16)
    want = scheme.weight.detach().double() @ sinusoids(torch.arange(9000), E, 10000.0, -1).T
    close(scheme._keys(9000), want, atol=2e-6)  # 24 products of 0.1 or so
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(scheme.float()._keys(9000), want, atol=2e-6)


# -- Music Transformer ---------------------------------------------------------------------------


@each_position
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize(
    ("max_len", "beyond"),
    [(71, "error"), *((n, beyond) for n in (None, 6, 71) for beyond in ("clip", "zero"))],
)
def test_music_shaw_equals_loops(pos, n_queries, beyond, max_len):
    rows = max_len or SITE.train_len
    scheme = MusicShaw(SITE, max_len, beyond, init_std=1.0)
    table = scheme.table.detach().double()

    def score(q, k, i, j, b, h, t):
        d = i - j
        if beyond == "clip":
            d = min(d, rows - 1, SITE.train_len - 1)
        vector = table[h, d] if d < rows else torch.zeros(D, dtype=torch.float64)
        return q @ (k + vector) / math.sqrt(D)

    check(scheme, score, pos, n_queries)


def test_music_shaw_equals_the_skew_of_the_paper():
    """Pad a column on the left, reshape, cut a row: row t moves by S - 1 - t."""
    scheme = MusicShaw(SITE, max_len=S, init_std=1.0)
    z, q, k = inputs(S)
    pos = torch.arange(S)
    relative = q @ scheme.table.flip(1).mT  # distances S - 1 .. 0: (B, H, S, S)
    skewed = F.pad(relative, (1, 0)).view(B, H, S + 1, S)[:, :, 1:]
    got = scheme.scores(z, q, k, pos, pos, None)
    close(got.tril(), (z + skewed / math.sqrt(D)).detach().tril(), atol=5e-6)


def test_music_shaw_limits_and_sentences():
    assert MusicShaw(SITE).table.shape == (H, SITE.train_len, D)
    assert MusicShaw(SITE).max_len == SITE.train_len
    assert MusicShaw(SITE, 5, "clip").max_len is None
    z, q, k = inputs(T)
    pos = torch.arange(S)
    with pytest.raises(UserError, match=f"distance {S - 1} is beyond max_len {S - 1}"):
        MusicShaw(SITE, S - 1).scores(z, q, k, pos[-T:], pos, None)
    with pytest.raises(UserError, match="max_len is 0"):
        MusicShaw(SITE, 0)
    with pytest.raises(UserError, match="beyond is 'wrap'; use error, clip, zero"):
        MusicShaw(SITE, beyond="wrap")


def test_music_shaw_clips_to_a_row_that_training_reaches():
    site = Site(E, H, D, train_len=S, seen=S - 2)  # distances of training: 0 .. S - 3
    z, q, k = inputs(1)
    pos = torch.arange(S)
    scheme = MusicShaw(site, beyond="clip")
    added = (scheme.scores(z, q, torch.zeros_like(k), pos[-1:], pos, None) - z)[0, 0, 0]
    assert torch.allclose(added[0], added[2])
    assert not torch.allclose(added[2], added[3])


# -- Inkling -------------------------------------------------------------------------------------


def test_inkling_golden():
    values = golden("inkling_rel")
    mix = torch.tensor(values["relative_states (n,H,d_rel)"])[None]  # (1, 6, 2, 3)
    scheme = InklingRel(Site(d_model=8, n_heads=2, d_head=4, train_len=6), d_rel=3, extent=4)
    with torch.no_grad():
        scheme.bank.copy_(torch.tensor(values["proj (d_rel=3, extent=4)"]))
    pos, z = torch.arange(6), torch.zeros(1, 2, 6, 6)
    q = torch.zeros(1, 2, 6, 4)
    got = scheme.scores(z, q, q, pos, pos, mix)[0]
    close(got.tril(), values["bias (H,i,j)"], atol=1e-6)


@each_position
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("extent", [None, 1, 4])
def test_inkling_equals_loops(pos, n_queries, extent):
    scheme = InklingRel(SITE, d_rel=5, extent=extent, init_std=1.0)
    x, none = torch.randn(B, S, E), torch.empty(0)
    *same, state = scheme.prepare(x, none, none, none, pos, None)
    assert all(part is none for part in same)
    assert state.shape == (B, S, H, 5)
    weight, bank = scheme.project.weight.detach().double(), scheme.bank.detach().double()

    def score(q, k, i, j, b, h, t):
        mix = weight[5 * h : 5 * h + 5] @ x[b, t].double()
        bias = mix @ bank[:, i - j] if i - j < (extent or SITE.train_len) else 0
        return q @ k / math.sqrt(D) + bias

    check(scheme, score, pos, n_queries, state)


def test_inkling_sentence():
    with pytest.raises(UserError, match="d_rel 0 and extent 16"):
        InklingRel(SITE, d_rel=0)


# -- DeBERTa -------------------------------------------------------------------------------------


def deberta_loop(scheme, buckets, same_row):
    table = scheme.table.detach().double()
    to_key, to_query = (x.weight.detach().double() for x in (scheme.key, scheme.query))

    def row(b):  # the paper's delta: clip to -k .. k - 1, counted from 0
        return max(-buckets, min(buckets - 1, b)) + buckets

    def score(q, k, i, j, b, h, t):
        heads = slice(D * h, D * h + D)
        bucket = int(scheme.bucket(torch.tensor([i - j])))
        key = to_key[heads] @ table[row(bucket)]
        query = to_query[heads] @ table[row(bucket if same_row else -bucket)]
        return (q @ k + q @ key + query @ k) / math.sqrt(3 * D)

    return score


@each_position
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("same_row", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_deberta_equals_loops(pos, n_queries, same_row, log):
    scheme = DebertaRel(SITE, buckets=6, log=log, same_row=same_row, init_std=1.0)
    check(scheme, deberta_loop(scheme, 6, same_row), pos, n_queries)


@pytest.mark.parametrize("log", [False, True])
def test_deberta_equals_transformers(log):
    """Sequences as long as theirs: they attend both ways, and the past is what is compared."""
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    n, buckets, max_distance = 40, 6, 21
    config = theirs.DebertaV2Config(
        hidden_size=E, num_attention_heads=H, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=buckets if log else -1,
        max_relative_positions=max_distance if log else buckets, hidden_dropout_prob=0.0,
    )  # fmt: skip
    attention = theirs.DisentangledSelfAttention(config)
    scheme = DebertaRel(SITE, buckets, log, max_distance if log else None, same_row=True)
    with torch.no_grad():
        for ours, other in (
            (scheme.key, attention.pos_key_proj),
            (scheme.query, attention.pos_query_proj),
        ):
            other.weight.copy_(ours.weight)
            other.bias.zero_()
    q, k = torch.randn(B, H, n, D), torch.randn(B, H, n, D)
    flat = [x.flatten(0, 1) for x in (q, k)]
    bias = attention.disentangled_attention_bias(*flat, None, scheme.table, 3).view(B, H, n, n)
    pos = torch.arange(n)
    z = q @ k.mT / math.sqrt(D)
    got = scheme.scores(z, q, k, pos, pos, None)
    want = q @ k.mT / math.sqrt(3 * D) + bias
    close(got.detach().tril(), want.detach().tril(), atol=5e-6)


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (32, 63), (32, 1000), (6, 21)])
def test_deberta_log_buckets_equal_transformers(buckets, max_distance):
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    d = torch.arange(2 * max_distance)
    want = theirs.make_log_bucket_position(d, buckets, max_distance).long()
    starts = torch.tensor(log_bucket_starts(buckets, max_distance))
    got = torch.searchsorted(starts, d, right=True) - 1
    # at the last edge their float32 logarithm is a whole number plus or minus a rounding error
    edge = d == max_distance - 1
    assert torch.equal(got[~edge], want[~edge].clamp(max=buckets))
    assert got[edge].item() == buckets - 1


def test_deberta_defaults_read_rows_that_training_reaches():
    site = Site(E, H, D, train_len=64, seen=63)  # distances of training: 0 .. 62
    for log, rows in ((False, 62), (True, 30)):
        scheme = DebertaRel(site, log=log)
        assert len(scheme.table) == 2 * rows
        assert scheme.bucket(torch.tensor([61, 62, 1000])).tolist() == [rows - 1, rows, rows]
        assert scheme.bucket(torch.arange(16)).tolist() == list(range(16))
        long = DebertaRel(Site(E, H, D, train_len=9000), log=log)
        assert len(long.table) == 2 * (256 if log else 512)


def test_deberta_sentences():
    with pytest.raises(UserError, match="max_distance needs log=true"):
        DebertaRel(SITE, max_distance=100)
    with pytest.raises(UserError, match="buckets 1 and max_distance 15"):
        DebertaRel(SITE, buckets=1)
    with pytest.raises(UserError, match="buckets 20 and max_distance 19"):
        DebertaRel(SITE, buckets=20, log=True, max_distance=19)


# -- TUPE ----------------------------------------------------------------------------------------


@each_position
@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("norm", [False, True])
def test_tupe_equals_loops(pos, n_queries, norm):
    scheme = Tupe(SITE, max_len=80, norm=norm, init_std=1.0)
    table = scheme.table.detach().double()
    if norm:  # at its start a layer norm has no scale and no shift
        table = table - table.mean(-1, keepdim=True)
        table = table / (table.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    to_query, to_key = (x.weight.detach().double() for x in (scheme.query, scheme.key))

    def score(q, k, i, j, b, h, t):
        heads = slice(D * h, D * h + D)
        place = (to_query[heads] @ table[i]) @ (to_key[heads] @ table[j])
        return (q @ k + place) / math.sqrt(2 * D)

    check(scheme, score, pos, n_queries)


def test_tupe_limits_and_sentences():
    scheme = Tupe(SITE)
    assert scheme.max_len == len(scheme.table) == SITE.train_len
    assert not any("norm" in name for name, _ in scheme.named_parameters())
    z, q, k = inputs(T)
    pos = torch.arange(9, 9 + S)
    with pytest.raises(UserError, match=r"length 18 is beyond max_len 16, .* position 17: train"):
        scheme.scores(z, q, k, pos[-T:], pos, None)
    with pytest.raises(UserError, match="max_len is 0"):
        Tupe(SITE, 0)


def test_txl_sentences():
    with pytest.raises(UserError, match="base is 1"):
        TransformerXL(SITE, base=1.0)


# -- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("make", [Shaw, TransformerXL, MusicShaw, InklingRel, DebertaRel, Tupe])
def test_nothing_is_larger_than_the_scores(make):
    n, d_head = 40, 64
    scheme = make(Site(E, H, d_head, train_len=n))
    pos = torch.arange(n)
    q, z = torch.randn(B, H, n, d_head), torch.zeros(B, H, n, n)
    x = torch.randn(B, n, E)
    with Largest() as largest:
        *_, state = scheme.prepare(x, q, q, q, pos, None)
        scheme.scores(z, q, q, pos, pos, state)
        scheme.value(z, pos, pos)
    # one column more than keys for the distances without a vector
    assert z.numel() <= largest.numel <= B * H * n * max(n + 1, d_head) < n * n * d_head
