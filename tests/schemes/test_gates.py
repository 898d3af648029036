"""Forget gates against published values, x-transformers and slow loops over the formulas."""

import copy
import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close, golden

from posx.attention import attend, block, choose_path
from posx.conformance import Layer, by_rows
from posx.errors import UserError
from posx.schemes import gates
from posx.schemes.base import Site
from posx.schemes.bias import alibi_slopes
from posx.schemes.gates import Cable, Fox, GrapeA, GrapeAP, Wall, channel_scores

J = torch.arange(S)


def stirred(scheme):
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return scheme


def inputs(n=S):
    return torch.randn(B, n, E), *(torch.randn(B, H, n, D) for _ in range(3))


def added(scheme, x, q, k, v):
    """What the scheme adds to q k / sqrt(D) of the last T queries, with 0 where j > i."""
    n = x.shape[1]
    own, keys, _, state = scheme.prepare(x, q, k, v, torch.arange(n), None)
    own, other = own[:, :, -T:], torch.randn(B, H, T, n)  # what another scheme added stays
    z = own @ keys.mT / math.sqrt(D) + other
    pos = torch.arange(n)
    got = scheme.scores(z, own, keys, pos[-T:], pos, state) - other
    return (got - q[:, :, -T:] @ k.mT / math.sqrt(D)).tril(n - T)


def linear(layer, x):
    """w x + b in float64, as a list of (r, t) vectors: (B, n, W)."""
    layer = copy.deepcopy(layer).double()
    return torch.stack(
        [torch.stack([layer.weight @ row + layer.bias for row in part]) for part in x.double()]
    )


def softplus(a):
    return (1 + a.exp()).log()


def pairs():
    """(t, i, j) of every query and every key that it sees."""
    return [(t, S - T + t, j) for t in range(T) for j in range(S - T + t + 1)]


# -- FoX -----------------------------------------------------------------------------------------


def test_fox_golden():
    values = golden("fox")
    q, k, v = (torch.tensor(values[name]).transpose(0, 1)[None] for name in "qkv")
    state = torch.tensor(values["log_forget_gate"], dtype=torch.float64).cumsum(0)[None]
    scheme = Fox(Site(d_model=8, n_heads=2, d_head=4, train_len=16))
    pos = torch.arange(6)
    out, _ = block(scheme, q, k, v, pos, pos, state)
    close(out[0].transpose(0, 1), values["fox_out"], 1e-6)


def test_fox_equals_x_transformers(oracle):
    theirs = oracle.DataDependentAlibi(E, H)
    scheme = stirred(Fox(SITE))
    theirs.to_forget_gates[0].load_state_dict(scheme.gate.state_dict())
    x, *rest = inputs()
    close(added(scheme, x, *rest), theirs(x)[:, :, -T:].detach().tril(S - T), 1e-5)


def test_fox_starts_where_x_transformers_does(oracle):
    gate = Fox(SITE, bias_init=5).gate
    assert torch.equal(gate.bias, oracle.DataDependentAlibi(E, H).to_forget_gates[0].bias)


def test_fox_equals_loops():
    scheme = stirred(Fox(SITE, bias_init=-0.5))
    x, *rest = inputs()
    f = 1 / (1 + (-linear(scheme.gate, x)).exp())  # (B, S, H)
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t, i, j in pairs():
        want[:, :, t, j] = f[:, j + 1 : i + 1].prod(1).log()
    close(added(scheme, x, *rest), want.detach(), 1e-5)


def half_open(n):
    """Logs of n gates, from closed to open, and their sums: at 8192 tokens these pass -10000."""
    logs = torch.nn.functional.logsigmoid(3 * torch.randn(1, n, H, dtype=torch.float64))
    return logs, logs.cumsum(1)


def test_sums_keep_their_digits_at_8192_tokens():
    n, near = 8192, 50
    logs, c = half_open(n)
    scheme = Fox(SITE)
    z = torch.zeros(1, H, 2, n)
    got = scheme.scores(z, NO_X, NO_X, torch.arange(n)[-2:], torch.arange(n), c)
    for t, i in enumerate((n - 2, n - 1)):
        for j in range(i - near, i):
            want = [math.fsum(logs[0, j + 1 : i + 1, h].tolist()) for h in range(H)]
            close(got[0, :, t, j], want, 1e-5)  # of up to 100; float32 sums are off by 1e-3


MERGED = {"fox": Fox, "cable": Cable, "cable_first": lambda site: Cable(site, "softplus", False)}


def with_sums(scheme, n, rate):
    """A layer whose tokens take `rate` off the keys before them on average, and its sums c."""
    c = -2 * rate * torch.rand(B, n, H, dtype=torch.float64).cumsum(1)
    weight = 2 * torch.rand(B, n, H, dtype=torch.float64)
    state = torch.cat([c, weight], -1) if getattr(scheme, "weight", None) is not None else c
    return Layer(scheme, *torch.randn(3, B, H, n, D), torch.arange(n), state), c, weight


@pytest.mark.parametrize("make", MERGED.values(), ids=MERGED)
def test_far_keys_are_a_term_a_query_and_one_a_key(make):
    n, n_far = 3000, 2900
    scheme = make(SITE)
    given, c, weight = with_sums(scheme, n, 0.7)
    by_query, by_key, extra = scheme.far(
        given.q[:, :, n_far:], given.pos[n_far:], given.pos[:n_far], given.state
    )
    assert extra is None
    assert by_query.dtype == by_key.dtype == torch.float32
    want = c.mT[:, :, n_far:, None] - c.mT[:, :, None, :n_far]
    if given.state.shape[-1] > H:
        want = want * weight.mT[:, :, n_far:, None]
    # Four roundings at most, of terms that all have one sign.
    torch.testing.assert_close((by_query + by_key).double(), want, rtol=2.4e-7, atol=0)


@pytest.mark.parametrize("rate", [0.7, 0.0005], ids=["near keys count", "far keys count"])
@pytest.mark.parametrize("make", MERGED.values(), ids=MERGED)
def test_far_keys_are_merged_exactly(make, rate):
    n, last = 2100, 6
    given = with_sums(make(SITE), n, rate)[0]
    assert choose_path(given.scheme, n, n, training=False) == "merged"
    with torch.no_grad():
        got = attend(*given[:4], given.pos, given.pos, given.state)[:, :, -last:]
    # float32 sums over 2100 keys
    assert (got.double() - by_rows(given, last)).abs().max() < 2e-6


def test_a_fold_stays_near_zero():
    """Half of the largest sum: a dot product rounds to the digits of its largest term."""
    _, c = half_open(1000)
    _, key = Fox(SITE).fold(torch.arange(1000), c)
    assert key.abs().max() <= 0.5 * c.abs().max() * D**0.5


@pytest.mark.parametrize(
    "make", [Fox, Cable, GrapeAP, Wall, lambda site: Cable(site, "softplus", False, False)]
)
def test_state_goes_on_where_it_stopped(make):
    scheme = stirred(make(SITE))
    x, q, k, v = inputs()
    whole = scheme.prepare(x, q, k, v, J, None)[3]
    past, start = None, 0
    for size in (1, 1, 5, 2):
        here = slice(start, start + size)
        part = (x[:, here], q[:, :, here], k[:, :, here], v[:, :, here], J[here])
        state = scheme.prepare(*part, past)[3]
        past = state if past is None else torch.cat([past, state], 1)
        start += size
    close(past, whole.detach(), 1e-5)


@pytest.mark.parametrize("make", [Fox, Cable, Wall])
def test_sums_are_float64_in_a_bfloat16_model_too(make):
    scheme = stirred(make(SITE)).bfloat16()
    x, q, k, v = (part.bfloat16() for part in inputs())
    assert scheme.prepare(x, q, k, v, J, None)[3].dtype == torch.float64


# -- CABLE ---------------------------------------------------------------------------------------


def test_cable_golden():
    """The first release: its scores of q and k, which are not divided."""
    values = golden("cable")
    x, q, k, weight, bias = (torch.tensor(values[n]) for n in ("x", "q", "k", "weight", "bias"))
    scheme = Cable(Site(d_model=6, n_heads=3, d_head=2, train_len=8), "softplus", False, False)
    scheme.step.load_state_dict({"weight": weight, "bias": bias})
    pos = torch.arange(5)
    q, k, _, state = scheme.prepare(x, q, k, k, pos, None)
    got = scheme.scores(q @ k.mT / math.sqrt(2), q, k, pos, pos, state)
    close(got.tril(), values["scores"], 1e-5)


@pytest.mark.parametrize("increments", ["relu", "softplus"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_cable_equals_loops(increments, weighted, scaled):
    scheme = stirred(Cable(SITE, increments, weighted, scaled))
    x, q, k, v = inputs()
    step = linear(scheme.step, x)
    step = step.clamp(min=0) if increments == "relu" else softplus(step)  # (B, S, H)
    weight = softplus(linear(scheme.weight, x)) if weighted else torch.ones(B, S, H)
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t, i, j in pairs():
        want[:, :, t, j] = -weight[:, i] * step[:, j + 1 : i + 1].sum(1)
        if not scaled:
            dot = (q[:, :, i].double() * k[:, :, j].double()).sum(-1)
            want[:, :, t, j] += dot - dot / math.sqrt(D)
    close(added(scheme, x, q, k, v), want.detach(), 1e-5)


def test_cable_without_its_weight_is_fox():
    """-softplus(a) = log sigmoid(-a), as the docstring says."""
    fox, cable = stirred(Fox(SITE)), Cable(SITE, "softplus", weighted=False)
    cable.step.load_state_dict({n: -p for n, p in fox.gate.state_dict().items()})
    x, q, k, v = inputs()
    states = [scheme.prepare(x, q, k, v, J, None)[3] for scheme in (fox, cable)]
    close(states[0], states[1].detach(), 1e-6)


# -- GRAPE ---------------------------------------------------------------------------------------


def grape_site():
    return Site(d_model=6, n_heads=3, d_head=4, train_len=8)


@pytest.mark.parametrize("gated", ["query_key", "key", "query"])
def test_grape_a_golden(gated):
    values = golden("grape")
    q, k = (torch.tensor(values[name]).transpose(1, 2) for name in "qk")
    scheme = GrapeA(grape_site(), gated)
    with torch.no_grad():
        scheme.rate.copy_(torch.tensor(values["omega"]))
        for direction, name in ((scheme.query, "v"), (scheme.key, "u")):
            if direction is not None:
                direction.copy_(torch.tensor(values[name]))
    pos = torch.arange(5)
    got = scheme.scores(torch.zeros(2, 3, 5, 5), q, k, pos, pos, None)
    close(got.tril(), values[gated], 1e-5)


@pytest.mark.parametrize("gated", ["query_key", "key", "query"])
def test_grape_a_equals_loops(gated):
    scheme = stirred(GrapeA(SITE, gated))
    x, q, k, v = inputs()
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t, i, j in pairs():
        for h, m in enumerate(alibi_slopes(H)):
            slope = 0
            for direction, seen in ((scheme.query, q[:, h, i]), (scheme.key, k[:, h, j])):
                if direction is not None:
                    unit = direction[h].double() / direction[h].double().norm()
                    slope = slope + softplus(seen.double() @ unit / math.sqrt(D))
            want[:, h, t, j] = -(i - j) * softplus(scheme.rate[h].double()) * m * slope
    close(added(scheme, x, q, k, v), want.detach(), 1e-5)


def test_grape_a_starts_at_alibi_s_slopes():
    scheme = GrapeA(SITE, "key")
    q = torch.zeros(B, H, S, D)  # gates of softplus(0) = ln 2
    got = scheme.scores(torch.zeros(B, H, 1, S), q[:, :, -1:], q, J[-1:], J, None)
    slopes = torch.tensor(alibi_slopes(H)) * math.log(2)
    close(got[0, :, 0], -slopes[:, None] * (S - 1 - J), 1e-5)


def test_grape_ap_golden():
    """The authors' code, in which p_i has no norm."""
    values = golden("grape")
    x = torch.tensor(values["x"])
    scheme = GrapeAP(grape_site(), 4, norm_query=False)
    # Their rotation turns the other way, as ours does with the columns of a pair exchanged.
    weight = torch.tensor(values["project"]).view(3, 2, 2, 6).flip(1).reshape(12, 6)
    scheme.project.load_state_dict({"weight": weight})
    pos = torch.arange(5)
    state = scheme.prepare(x, NO_X, NO_X, NO_X, pos, None)[3]
    got = scheme.scores(torch.zeros(2, 3, 5, 5), NO_X, NO_X, pos, pos, state)
    close(got.tril(), values["path_bias"], 1e-5)


@pytest.mark.parametrize("norm_query", [False, True])
def test_grape_ap_equals_loops(norm_query):
    width = 6
    scheme = stirred(GrapeAP(SITE, width, norm_query))
    x, *rest = inputs()
    p = x.double() @ scheme.project.weight.double().T
    p = p.unflatten(-1, (H, width))  # (B, S, H, P)
    unit = p / p.square().mean(-1, keepdim=True).sqrt()
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t, i, j in pairs():
        asks = unit[:, i] if norm_query else p[:, i]  # (B, H, P)
        for between in range(j + 1, i + 1):
            cos, sin = math.cos(between), math.sin(between)
            one, two = unit[:, between].chunk(2, -1)
            turned = torch.cat([one * cos - two * sin, one * sin + two * cos], -1)
            gate = 1 / (1 + (-(asks * turned).sum(-1) / width).exp())
            want[:, :, t, j] += gate.log() * torch.tensor(alibi_slopes(H))
    close(added(scheme, x, *rest), want.detach(), 1e-5)


# -- Wall ----------------------------------------------------------------------------------------


def test_wall_golden():
    values = golden("wall")
    q, k, v = (torch.tensor(values[name]).transpose(1, 2) for name in "qkv")
    state = torch.tensor(values["log_gate"], dtype=torch.float64).cumsum(1).flatten(2)
    pos = torch.arange(5)
    out, _ = block(Wall(grape_site()), q, k, v, pos, pos, state)
    close(out.transpose(1, 2), values["out"], 1e-6)


def by_channel(q, k, c):
    """The definition in float64, query by query; 0 where j > i."""
    start = k.shape[2] - q.shape[2]
    z = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for t in range(q.shape[2]):
        seen = slice(0, start + t + 1)
        decay = (c[:, :, start + t, None] - c[:, :, seen]).exp()  # at most 1
        z[:, :, t, seen] = (q[:, :, t, None].double() * k[:, :, seen].double() * decay).sum(-1)
    return z


def steep(n):
    """Gates of e^-100 to 1, whose sums leave the range of exp in float32 and in float64."""
    return -(torch.rand(B, H, n, D, dtype=torch.float64) * 100).where(
        torch.rand(B, H, n, D) < 0.2, torch.tensor(0.01, dtype=torch.float64)
    )


@pytest.mark.parametrize("leaf", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (5, 9), (9, 9), (4, 8), (3, 40), (33, 40)])
def test_halves_equal_the_definition(monkeypatch, leaf, sizes):
    monkeypatch.setattr(gates, "LEAF", leaf)
    n_queries, n_keys = sizes
    q, k, c = torch.randn(B, H, n_queries, D), torch.randn(B, H, n_keys, D), steep(n_keys)
    c = c.cumsum(2)
    got = channel_scores(q, k, c)
    assert got.isfinite().all()
    close(got.tril(n_keys - n_queries), by_channel(q, k, c), 1e-5)


def test_wall_is_exact_and_finite_at_8192_tokens():
    n, rows = 8192, 40
    c = steep(n).cumsum(2)
    assert c.min() < -5000
    q, k = torch.randn(B, H, rows, D), torch.randn(B, H, n, D)
    got = channel_scores(q, k, c)
    assert got.isfinite().all()
    close(got[:, :, ::13].tril(n - rows), by_channel(q, k, c)[:, :, ::13].tril(n - rows), 1e-5)


def test_wall_gradients_are_finite_where_gates_are_closed():
    logs = steep(20).requires_grad_()
    q, k = (torch.randn(B, H, 20, D, requires_grad=True) for _ in range(2))
    channel_scores(q, k, logs.cumsum(2)).tril().square().sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in (q, k, logs))


def test_wall_equals_loops():
    scheme = stirred(Wall(SITE, bias_init=1.0))
    x, q, k, v = inputs()
    f = 1 / (1 + (-linear(scheme.gate, x)).exp())  # (B, S, H D)
    f = f.unflatten(-1, (H, D)).detach()
    want = torch.zeros(B, H, T, S, dtype=torch.float64)
    for t, i, j in pairs():
        kept = f[:, j + 1 : i + 1].prod(1)  # (B, H, D)
        dot = q[:, :, i].double() * k[:, :, j].double()
        want[:, :, t, j] = (dot * (kept - 1)).sum(-1) / math.sqrt(D)
    close(added(scheme, x, q, k, v), want, 1e-5)


# -- all -----------------------------------------------------------------------------------------


def test_parameters_are_as_documented():
    counts = {
        Fox(SITE): (E + 1) * H,
        Cable(SITE): 2 * (E + 1) * H,
        Cable(SITE, weighted=False): (E + 1) * H,
        GrapeA(SITE): H * (2 * D + 1),
        GrapeA(SITE, "key"): H * (D + 1),
        GrapeAP(SITE): E * H * 8,
        Wall(SITE): H * D * (E + 1),
    }
    for scheme, count in counts.items():
        assert sum(p.numel() for p in scheme.parameters()) == count, type(scheme).__name__


def test_bad_parameters_are_refused():
    with pytest.raises(UserError, match="cable: increments is 'gelu'; use relu or softplus"):
        Cable(SITE, "gelu")
    with pytest.raises(UserError, match="grape_a: gated is 'both'; use query_key, key, query"):
        GrapeA(SITE, "both")
    for width in (0, 7):
        with pytest.raises(UserError, match=f"grape_ap: width is {width}; it must be even"):
            GrapeAP(SITE, width)
