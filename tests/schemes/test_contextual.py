"""Contextual positions against published values, x-transformers and loops over tokens."""

import copy
import math
from functools import partial

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close, golden

from posx import conformance
from posx.attention import block, choose_path
from posx.conformance import Subject
from posx.errors import UserError
from posx.schemes import contextual
from posx.schemes.base import Nope, Site
from posx.schemes.bias import Alibi
from posx.schemes.contextual import (
    Carope,
    Cope,
    Repo,
    Selective,
    SelectiveRope,
    StickBreaking,
    Tapa,
)
from posx.schemes.mask import Window
from posx.schemes.rotary import Rope
from posx.schemes.temperature import Entmax

EXACT = 3e-6  # float32 sums of a dozen terms near 1
LAST, J = torch.arange(S - T, S), torch.arange(S)
GOLDEN_SITE = Site(d_model=8, n_heads=2, d_head=4, train_len=16)


def stirred(scheme):
    return conformance.stirred(scheme)


def qkv(n=S):
    return [torch.randn(B, H, n, D) for _ in range(3)]


def golden_qkv():
    """q, k, v of the golden values: (1, 2, 6, 4)."""
    values = golden("contextual")
    return [torch.tensor(values[name]).transpose(0, 1)[None] for name in ("q", "k", "v")]


def content(q, k):
    """(B, H, T, S)"""
    return q @ k.mT / math.sqrt(q.shape[-1])


def visible(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)


# -- CoPE ----------------------------------------------------------------------------------------


def cope_by_loops(scheme, z, q):
    """What is added to the visible scores of the last T of S tokens, 0 elsewhere; in float64."""
    table = scheme.table.detach().double()
    added = torch.zeros(z.shape, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, z.shape[:3])).tolist():
        own = z.shape[3] - z.shape[2] + t
        count = 0.0
        for s in range(own, -1, -1):
            count += 1 / (1 + math.exp(-z[b, h, t, s].item()))
            where = min(count, len(table) - 1)
            low, high = math.floor(where), math.ceil(where)
            vector = (where - low) * table[high] + (1 - where + low) * table[low]
            added[b, h, t, s] = q[b, h, t].double() @ vector
    return added / math.sqrt(D) if scheme.scaled else added


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_pos", [2, 3, 17])  # clamped early, and never
def test_cope_equals_loops(max_pos, scaled):
    scheme = stirred(Cope(SITE, max_pos, scaled))
    q, k, _ = qkv()
    z = content(q[:, :, -T:], k)
    got = scheme.scores(z, q[:, :, -T:], k, LAST, J, None) - z
    close(got * visible(T, S), cope_by_loops(scheme, z, q[:, :, -T:]), EXACT)


def test_cope_golden():
    values = golden("contextual")["cope"]
    scheme = Cope(GOLDEN_SITE, max_pos=4)
    with torch.no_grad():
        scheme.table.copy_(torch.tensor(values["table"]))
    q, k, _ = golden_qkv()
    z = content(q, k)
    got = scheme.scores(z, q, k, torch.arange(6), torch.arange(6), None) - z
    close(got[0] * visible(6, 6), values["bias"], 1e-6)


def test_cope_equals_x_transformers(oracle):
    theirs = oracle.CoPE(D, H, max_pos=5)
    torch.nn.init.normal_(theirs.pos_emb)
    scheme = Cope(SITE, max_pos=5)
    with torch.no_grad():
        scheme.table.copy_(theirs.pos_emb)
    q, k, _ = qkv()
    z = content(q, k).masked_fill(~visible(S, S), -torch.finfo(torch.float32).max)
    want = theirs(q, z)
    got = scheme.scores(content(q, k), q, k, J, J, None) - content(q, k)
    close(got * visible(S, S), want.detach() * visible(S, S), 1e-5)


def test_cope_has_one_row_more_than_training_has_positions():
    assert Cope(SITE).table.shape == (SITE.train_len + 1, D)
    assert Cope(Site(E, H, D, 16, seen=11)).table.shape == (12, D)
    assert Cope(SITE, max_pos=3).table.shape == (3, D)
    q, k, _ = qkv()
    z = content(q, k)
    assert torch.equal(Cope(SITE).scores(z, q, k, J, J, None), z)  # it starts at nothing


# -- stick-breaking ------------------------------------------------------------------------------


def sticks_by_loops(z, attend_current):
    """Weights of the last T of S tokens, in float64."""
    p = torch.zeros(z.shape, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, z.shape[:3])).tolist():
        own = z.shape[3] - z.shape[2] + t
        left = 1.0
        for s in range(own if attend_current else own - 1, -1, -1):
            share = 1 / (1 + math.exp(-z[b, h, t, s].item()))
            p[b, h, t, s] = share * left
            left *= 1 - share
    return p


@pytest.mark.parametrize("attend_current", [False, True])
def test_sticks_equal_loops(attend_current):
    z = 3 * torch.randn(B, H, T, S)
    scheme = StickBreaking(SITE, attend_current)
    got = scheme.normalize(z.masked_fill(~visible(T, S), -torch.inf))
    close(got, sticks_by_loops(z, attend_current), 1e-6)


@pytest.mark.parametrize("attend_current", [False, True])
def test_sticks_golden(attend_current):
    values = golden("contextual")
    q, k, v = golden_qkv()
    pos = torch.arange(6)
    out, p = block(StickBreaking(GOLDEN_SITE, attend_current), q, k, v, pos, pos, None)
    key = "stickbreaking_attend_current" if attend_current else "stickbreaking"
    close(out[0].transpose(0, 1), values[key], 1e-6)
    if not attend_current:
        close(1 - p.sum(-1)[0].T, values["stickbreaking_remainder"], 1e-6)
        assert (out[:, :, 0] == 0).all()


def test_sticks_of_extreme_and_hidden_scores():
    """Scores of +-100 neither overflow nor divide by 0, and gradients of hidden keys are 0."""
    z = torch.tensor([[-100, 100.0, -torch.inf, 2.0, -100, 0.0]], requires_grad=True)
    p = StickBreaking(SITE, attend_current=True).normalize(z[None, None])[0, 0]
    share = 1 / (1 + math.exp(-2.0))
    close(p, [[0, (1 - share) / 2, 0, share / 2, 0, 0.5]], 1e-5)  # 100 is rounded to 8e-6
    p.square().sum().backward()
    assert z.grad.isfinite().all()
    assert z.grad[0, 2] == 0
    hidden = torch.full((1, 1, 2, 4), -torch.inf, requires_grad=True)
    p = StickBreaking(SITE).normalize(hidden)
    assert (p == 0).all()
    p.sum().backward()
    assert (hidden.grad == 0).all()


def test_sticks_ignore_what_is_far():
    """Nothing that lies behind a key changes its weight."""
    z = torch.randn(1, 1, 1, S)
    other = z.clone()
    other[..., :4] = 9.0
    scheme = StickBreaking(SITE)
    assert torch.equal(scheme.normalize(z)[..., 4:], scheme.normalize(other)[..., 4:])


# -- selective -----------------------------------------------------------------------------------


def hidden_by_loops(q, k):
    """F (B, S, S) in float64, from the queries and keys of head 0."""
    q, k = q[:, 0].double(), k[:, 0].double()
    n = q.shape[1]
    hidden = torch.zeros(len(q), n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(1, i):  # key 0 is never hidden
            for by in range(j + 1, i):
                score = (q[:, by] * k[:, j]).sum(-1) / math.sqrt(q.shape[-1])
                hidden[:, i, j] += score.relu()
    return hidden


@pytest.mark.parametrize("inner", [Nope, Rope])
@pytest.mark.parametrize("rows", [1, T, S])
def test_selective_equals_loops(inner, rows):
    scheme = Selective(SITE, inner)
    q, k, _, state = scheme.prepare(NO_X, *qkv(), J, None)
    own = q[:, :, -rows:]
    z = content(own, k)
    got = scheme.scores(z, own, k, J[-rows:], J, state)
    want = (z.double() - hidden_by_loops(q, k)[:, None, -rows:]) * visible(rows, S)
    close(got * visible(rows, S), want, EXACT)


def test_selective_golden():
    q, k, v = golden_qkv()
    pos = torch.arange(6)
    scheme = Selective(GOLDEN_SITE, Nope)
    state = scheme.prepare(NO_X, q, k, v, pos, None)[3]
    got = scheme.scores(content(q, k), q, k, pos, pos, state)
    close(got[0] * visible(6, 6), golden("contextual")["selective"], 1e-6)


def test_selective_equals_x_transformers(oracle):
    attend = pytest.importorskip("x_transformers.attend")
    q, k, v = qkv()
    # They get masked scores.
    z = content(q, k).masked_fill(~visible(S, S), -torch.finfo(torch.float32).max)
    want = attend.selective_attn(z)
    scheme = Selective(SITE, Nope)
    state = scheme.prepare(NO_X, q, k, v, J, None)[3]
    got = scheme.scores(content(q, k), q, k, J, J, state)
    close(got * visible(S, S), want * visible(S, S), EXACT)


@pytest.mark.parametrize("training", [False, True])
def test_selective_in_chunks_of_earlier_queries(monkeypatch, training):
    scheme = Selective(SITE, Nope)
    q, k, _, state = scheme.prepare(NO_X, *(x.requires_grad_() for x in qkv()), J, None)
    gradients = []
    for size in (10**6, 4 * B * S * 2):  # all at once, and two queries at a time
        monkeypatch.setattr(contextual, "CHUNK_BYTES", size)
        own = q[:, :, -2:]
        with torch.set_grad_enabled(training):
            z = scheme.scores(content(own, k), own, k, J[-2:], J, state)
        gradients.append((z, *(torch.autograd.grad(z.square().sum(), (q, k)) if training else ())))
    for got, want in zip(*gradients, strict=True):
        close(got, want.detach(), 1e-5)  # float32 gradients of sums of squares near 10


def test_selective_stands_over_what_acts_before_the_scores():
    for inner in (Alibi, Window, Cope):
        with pytest.raises(UserError, match=rf"selective: {inner.__name__} changes the scores"):
            Selective(SITE, inner)
    with pytest.raises(UserError, match="SelectiveRope keeps a state"):
        Selective(SITE, SelectiveRope).prepare(torch.randn(B, S, E), *qkv(), J, None)
    assert Selective(SITE, partial(Entmax, over=Rope)).overrides("normalize")


# -- angles from content -------------------------------------------------------------------------


def turned(x, angle):
    """Pairs (c, c + D / 2) of one vector turned. x: (D,), angle: (D / 2,)"""
    a, b = x.double().chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()])


def selective_rope_by_loops(scheme, x, q):
    """Turned q in float64, token by token."""
    scheme = copy.deepcopy(scheme).double()
    x, out = x.double(), torch.zeros(q.shape, dtype=torch.float64)
    F_ = D // 2
    for b in range(len(x)):
        lows, total = [], torch.zeros(H * F_, dtype=torch.float64)
        for t in range(x.shape[1]):
            unit = torch.cat([part / part.norm() for part in x[b, t].chunk(H)])
            lows.append(scheme.up.weight @ (scheme.down.weight @ unit))
            turn = torch.zeros(H * F_, dtype=torch.float64)
            for back in range(min(len(scheme.taps), t + 1)):
                turn = turn + scheme.taps[-1 - back] * lows[t - back]
            if scheme.silu:
                turn = turn / (1 + (-turn).exp())
            if scheme.bias is not None:
                turn = turn + scheme.bias.exp()
            if scheme.gate is not None:
                gate = 1 / (1 + (-(scheme.gate.weight @ unit + scheme.gate.bias)).exp())  # (H,)
                turn = turn * gate.repeat_interleave(F_)
            total = total + turn
            for h in range(H):
                theta = torch.tensor([500000.0 ** (-2 * c / D) for c in range(F_)])
                out[b, h, t] = turned(q[b, h, t], total[h * F_ : (h + 1) * F_] * theta)
    return out.detach()


@pytest.mark.parametrize("options", [{}, {"silu": True}, {"bias": True, "phase_gate": True}])
@pytest.mark.parametrize("taps", [1, 4])
def test_selective_rope_equals_loops(options, taps):
    scheme = stirred(SelectiveRope(SITE, rank=5, taps=taps, **options))
    x = torch.randn(B, S, E)
    q, k, v = qkv()
    got = scheme.prepare(x, q, k, v, J, None)
    for part, before in zip(got, (q, k), strict=False):
        close(part, selective_rope_by_loops(scheme, x, before), 1e-5)  # angles of up to 20
    assert torch.equal(got[2], v)


def test_selective_rope_goes_on_where_it_stopped():
    scheme = stirred(SelectiveRope(SITE, bias=True, phase_gate=True))
    x = torch.randn(B, S, E)
    q, k, v = qkv()
    whole = scheme.prepare(x, q, k, v, J, None)
    past, start, pieces = None, 0, []
    for size in (1, 2, 5, 1):
        here = slice(start, start + size)
        part = (x[:, here], q[:, :, here], k[:, :, here], v[:, :, here], J[here])
        done = scheme.prepare(*part, past)
        past = done[3] if past is None else torch.cat([past, done[3]], 1)
        pieces.append(done[0])
        start += size
    close(torch.cat(pieces, 2), whole[0].detach(), EXACT)
    close(past, whole[3].detach(), EXACT)


def test_selective_rope_is_rope_where_only_the_bias_turns():
    scheme = SelectiveRope(SITE, bias=True)
    with torch.no_grad():
        scheme.taps.zero_()
    q, k, v = qkv()
    got = scheme.prepare(torch.randn(B, S, E), q, k, v, J, None)[:2]
    want = Rope(SITE, base=500000.0).prepare(NO_X, q, k, v, J + 1, None)[:2]
    for ours, rope in zip(got, want, strict=True):
        close(ours, rope, EXACT)


def test_carope_starts_as_rope_and_equals_loops():
    scheme, x = Carope(SITE), torch.randn(B, S, E)
    q, k, v = qkv()
    got = scheme.prepare(x, q, k, v, J, None)[:2]
    for ours, rope in zip(got, Rope(SITE).prepare(NO_X, q, k, v, J + 1, None)[:2], strict=True):
        close(ours, rope, EXACT)
    stirred(scheme)
    weight, bias = (p.detach().double() for p in scheme.choose.parameters())
    want = torch.zeros(B, H, S, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            angle = torch.zeros(D // 2, dtype=torch.float64)
            for t in range(S):
                f = 1 / (1 + (1 + (weight[h] @ x[b, t].double() + bias[h]).exp()).log())
                angle = angle + f ** torch.arange(D // 2)
                want[b, h, t] = turned(q[b, h, t], angle)
    close(scheme.prepare(x, q, k, v, J, None)[0], want, EXACT)


def repo_by_loops(scheme, x, q):
    scheme = copy.deepcopy(scheme).double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    theta = torch.tensor([10000.0 ** (-2 * c / D) for c in range(D // 2)], dtype=torch.float64)
    for b in range(len(x)):
        for t in range(x.shape[1]):
            gate = scheme.gate.weight @ x[b, t].double()
            hidden = gate / (1 + (-gate).exp()) * (scheme.content.weight @ x[b, t].double())
            for h in range(H):
                out[b, h, t] = turned(q[b, h, t], (scheme.final.weight[h] @ hidden) * theta)
    return out.detach()


def test_repo_equals_loops():
    scheme = stirred(Repo(SITE, hidden=5))
    x = torch.randn(B, S, E)
    q, k, v = qkv()
    got = scheme.prepare(x, q, k, v, J, None)
    for part, before in zip(got, (q, k), strict=False):
        close(part, repo_by_loops(scheme, x, before), 1e-5)


def test_repo_starts_at_its_layer():
    site = Site(E, H, D, 16, n_layers=16)
    q, k, v = qkv()
    for layer, chooses in ((0, False), (4, False), (5, True), (15, True)):
        scheme = Repo(site.at(layer))
        assert bool(list(scheme.parameters())) == chooses
        if not chooses:
            got = scheme.prepare(torch.randn(B, S, E), q, k, v, J, None)[0]
            assert torch.equal(got, Rope(site).prepare(NO_X, q, k, v, J, None)[0])
    assert Repo(Site(E, H, D, 16, n_layers=32).at(9)).chooses is False
    assert Repo(Site(E, H, D, 16, n_layers=32).at(10)).gate.weight.shape == (E // 8, E)


# -- TAPA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.5), (0.7, 0.25)])
def test_tapa_equals_loops(alpha, share):
    q, k, _ = qkv()
    a = round(share * D)
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t in range(T):
        for s in range(S - T + t + 1):
            query, key = q[:, :, S - T + t].double(), k[:, :, s].double()
            phase = (query[..., a:] * key[..., a:]).sum(-1) / math.sqrt(D - a)
            turns = 2 * math.pi * (S - T + t - s) ** alpha * phase
            want[:, :, t, s] = (query[..., :a] * key[..., :a]).sum(-1) / math.sqrt(a) * turns.cos()
    own = q[:, :, -T:]
    other = torch.randn(B, H, T, S)  # what another scheme added stays
    z = content(own, k) + other
    got = Tapa(SITE, alpha, share).scores(z, own, k, LAST + 7, J + 7, None) - other
    close(got * visible(T, S), want, 2e-5)  # phases of up to 60, rounded to 4e-6


# ------------------------------------------------------------------------------------------------


def test_paths():
    """What only turns q and k keeps the fused kernel; the others have blocks."""
    for scheme, path in (
        (SelectiveRope(SITE), "sdpa"),
        (Carope(SITE), "sdpa"),
        (Repo(SITE), "sdpa"),
        (Cope(SITE), "blocks"),
        (StickBreaking(SITE), "blocks"),
        (Selective(SITE, Rope), "blocks"),
        (Tapa(SITE), "blocks"),
    ):
        assert choose_path(scheme, 2000, 2000, False) == path


@pytest.mark.parametrize("make", [partial(Selective, over=Rope), partial(SelectiveRope, silu=True)])
def test_variants_decode_and_have_one_result_on_all_paths(make):
    subject = Subject("mine", make, "Mine: a scheme of a test")
    conformance.check_paths_agree(subject)
    conformance.check_cached_decoding(subject)
    conformance.check_half_precision(subject)


def test_numbers_of_parameters():
    def count(scheme):
        return sum(p.numel() for p in scheme.parameters())

    assert count(Cope(SITE, 5)) == 5 * D
    assert count(SelectiveRope(SITE)) == 16 * (E + H * D // 2) + 4 * H * D // 2
    gated = SelectiveRope(SITE, bias=True, phase_gate=True)
    assert count(gated) == count(SelectiveRope(SITE)) + H * D // 2 + (E + 1) * H
    assert count(Carope(SITE)) == (E + 1) * H
    assert count(Repo(SITE)) == 2 * E * (E // 8) + E // 8 * H
    for scheme in (StickBreaking(SITE), Selective(SITE, Nope), Tapa(SITE)):
        assert count(scheme) == 0


def test_bad_parameters_are_refused():
    for make, sentence in (
        (partial(Cope, max_pos=1), "cope: max_pos is 1; it must be at least 2"),
        (partial(SelectiveRope, rank=0), "selective_rope: rank 0 and taps 4; both must be"),
        (partial(SelectiveRope, base=1.0), "selective_rope: base is 1.0; it must be above 1"),
        (partial(Repo, hidden=0), "repo: hidden 0 and start_layer 0 of 1 layers"),
        (partial(Repo, start_layer=1), "repo: hidden 3 and start_layer 1 of 1 layers"),
        (partial(Tapa, share=0.0), "tapa: alpha 0.1 and share 0.0 of d_head 8"),
        (partial(Tapa, alpha=0.0), "tapa: alpha 0.0 and share 0.5 of d_head 8"),
    ):
        with pytest.raises(UserError) as refusal:
            make(SITE)
        assert str(refusal.value).startswith(sentence)
    with pytest.raises(UserError, match="d_model 25 does not divide into 3 heads"):
        SelectiveRope(Site(25, H, D, 16))
    with pytest.raises(UserError, match="repo: d_head 7 is odd"):
        Repo(Site(E, H, 7, 16))
