"""Temperatures against published values, packages and loops over queries and keys."""

import copy
import math
from functools import partial

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close, golden

from posx import conformance
from posx.attention import attend, block, choose_path
from posx.conformance import Subject
from posx.errors import UserError
from posx.schemes import temperature
from posx.schemes.absolute import Learned
from posx.schemes.base import Nope, Scheme, Site
from posx.schemes.bias import T5, Alibi
from posx.schemes.hybrid import AttnSink
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope
from posx.schemes.temperature import (
    ADATEMP,
    AdaptiveScale,
    Adatemp,
    Entmax,
    HeadScale,
    Llama4,
    Logn,
    Sia,
    Ssmax,
    entmax15,
)

TEMPERATURES = (Logn, Ssmax, Llama4, HeadScale)
EXACT = 2e-6  # float32, sums of D = 8 products near 1


class Drawn(Scheme):
    """Gives positions of its own, like a scheme that draws them."""

    def positions(self, symbols, offset, generator):
        return 3 * super().positions(symbols, offset, generator)


def qkv(n=S):
    return [torch.randn(B, H, n, D) for _ in range(3)]


def factors(scheme, pos):
    """f of the queries at these positions, read off the queries: (H, T)."""
    q = torch.ones(1, H, len(pos), D)
    got = scheme.prepare(NO_X, q, q, q, pos, None)[0]
    assert (got == got[..., :1]).all()
    return got[0, :, :, 0]


def test_llama4_golden():
    values = golden("temperature")
    pos = torch.tensor(values["positions"])
    for key, want in values.items():
        if key.startswith("llama4"):
            scale = int(key.split("floor_scale=")[1].split(" ")[0])
            got = factors(Llama4(SITE, Nope, floor_scale=scale), pos)
            close(got, [want] * H, atol=2e-7)  # half a unit of a number below 2
    want = values["ministral3 beta=0.1 max_pos=512 (floor(pos/512), no +1)"]
    close(factors(Llama4(SITE, Nope, floor_scale=512, offset=0), pos), [want] * H, atol=2e-7)


def test_llama4_starts_where_training_ends():
    L = SITE.train_len
    got = factors(Llama4(SITE, Nope), torch.arange(2 * L))[0]
    assert (got[: L - 1] == 1).all()
    close(got[L - 1 :], [1 + 0.1 * math.log(2)] * L + [1 + 0.1 * math.log(3)], atol=2e-7)


def test_ssmax_golden():
    values = golden("temperature")["ssmax n=4 s=0.43"]
    z = torch.tensor(values["z"])
    scheme = Ssmax(Site(E, 1, 1, 16), Nope, init=0.43)
    q = scheme.prepare(NO_X, *[torch.ones(1, 1, 4, 1)] * 3, torch.arange(4), None)[0]
    close((q[0, 0, 3] * z).softmax(-1), values["out"], atol=1e-6)


@pytest.mark.parametrize("length", [16, 64, 1024])
def test_ssmax_is_one_on_average_over_the_training_length(length):
    scheme = Ssmax(Site(E, H, D, length), Nope)
    # a mean of up to 1024 float32 numbers near 1
    close(factors(scheme, torch.arange(length)).mean(-1), torch.ones(H), atol=1e-5)
    if length == 1024:
        assert scheme.s[0].item() == pytest.approx(0.168, abs=5e-4)  # the paper's number


def test_ssmax_has_one_s_a_head_and_ignores_all_but_the_first_key():
    scheme = Ssmax(SITE, Nope)
    with torch.no_grad():
        scheme.s.copy_(torch.tensor([0.5, 1.0, -2.0]))
    got = factors(scheme, torch.tensor([0, 1, 7]))
    want = [[s * math.log(n) for n in (1, 2, 8)] for s in (0.5, 1.0, -2.0)]
    close(got, want, atol=1e-6)
    assert (got[:, 0] == 0).all()


def test_logn_clipped_and_not():
    L, pos = SITE.train_len, torch.tensor([0, 1, 14, 15, 16, 255])
    plain = [math.log(p + 1) / math.log(L) for p in pos.tolist()]
    close(factors(Logn(SITE, Nope, clipped=False), pos), [plain] * H, atol=5e-7)
    close(factors(Logn(SITE, Nope), pos), [[max(1, f) for f in plain]] * H, atol=5e-7)
    assert plain[-1] == pytest.approx(2)  # 256 = 16^2


def test_headscale_starts_at_one_and_knows_no_position():
    scheme = HeadScale(SITE, Nope)
    assert (factors(scheme, torch.arange(S)) == 1).all()
    with torch.no_grad():
        scheme.scale.copy_(torch.tensor([0.5, 1.0, 2.0]))
    close(factors(scheme, torch.arange(S)), [[f] * S for f in (0.5, 1.0, 2.0)], atol=0)
    assert HeadScale(SITE, Rope).relative
    assert not HeadScale(SITE, Learned).relative
    assert not Logn(SITE, Rope).relative


def output_by_loops(q, k, v, f, bias, scale_bias):
    """Attention of the last T queries in float64. f: (H, T), bias: (H, T, S)."""
    q, k, v, f, bias = (x.double() for x in (q, k, v, f, bias))
    out = torch.zeros(B, H, T, D, dtype=torch.float64)
    for t in range(T):
        seen = S - T + t + 1
        for h in range(H):
            z = k[:, h, :seen] @ q[:, h, S - T + t, :, None] / math.sqrt(D)  # (B, seen, 1)
            own = bias[h, t, :seen, None]
            z = f[h, t] * (z + own) if scale_bias else f[h, t] * z + own
            out[:, h, t] = (z.softmax(1) * v[:, h, :seen]).sum(1)
    return out


@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize("inner", [Nope, Alibi, T5])
@pytest.mark.parametrize("scale_bias", [False, True])
def test_only_what_it_says_grows(kind, inner, scale_bias):
    torch.manual_seed(1)
    scheme = kind(SITE, inner, scale_bias=scale_bias)
    conformance.stirred(scheme)
    j = torch.arange(3 * SITE.train_len, 3 * SITE.train_len + S)
    q, k, v = qkv()
    f = scheme.factor((j[-T:] + 1.0)[None]).detach().expand(H, T)
    bias = torch.zeros(H, T, S)
    if inner is not Nope:
        bias = scheme.over.distance_bias((j[-T:, None] - j).clamp(min=0)).detach()
    want = output_by_loops(q, k, v, f, bias, scale_bias)
    q, k, v, state = scheme.prepare(NO_X, q, k, v, j, None)
    with torch.no_grad():
        close(attend(scheme, q[:, :, -T:], k, v, j[-T:], j, state), want, EXACT)
        close(block(scheme, q[:, :, -T:], k, v, j[-T:], j, state)[0], want, EXACT)


@pytest.mark.parametrize("kind", TEMPERATURES)
def test_fused_paths_stay(kind):
    for inner, path in ((Rope, "sdpa"), (Alibi, "strips")):
        assert choose_path(kind(SITE, inner), 2000, 2000, False) == path
    assert choose_path(kind(SITE, Alibi), 2000, 2000, True) == "folded"
    assert choose_path(kind(SITE, Rope, scale_bias=True), 2000, 2000, False) == "sdpa"
    assert choose_path(kind(SITE, Alibi, scale_bias=True), 2000, 2000, True) == "blocks"
    assert choose_path(kind(SITE, Window), 2000, 2000, False) == "banded"
    assert kind(SITE, Shaw).overrides("far")  # made of q, which has grown
    assert not kind(SITE, Shaw, scale_bias=True).overrides("far")


@pytest.mark.parametrize(("inner", "scale_bias"), [(Alibi, True), (Shaw, False)])
def test_temperatures_pass_conformance_around_a_bias(inner, scale_bias):
    make = partial(Ssmax, over=inner, scale_bias=scale_bias)
    assert failures(make) == []


def failures(make):
    results = conformance.run(Subject("mine", make, "Mine: a scheme of a test"))
    return [f"{each.check}: {each.message}" for each in results if not each.passed]


def test_adaptive_scale_equals_loops():
    scheme = AdaptiveScale(SITE, Nope, delta=0.7, gamma_range=1.5)
    conformance.stirred(scheme)
    x = torch.randn(B, S, E)
    q, k, v = qkv()
    pos = torch.arange(5, 5 + S)
    got = scheme.prepare(x, q, k, v, pos, None)[0]
    want = torch.zeros(B, H, S, D, dtype=torch.float64)
    gates = copy.deepcopy(scheme).double()
    for t in range(S):
        for h in range(H):
            beta = gates.beta.weight[h] @ x[:, t].double().T + gates.beta.bias[h]  # (B,)
            gamma = gates.gamma.weight[h] @ x[:, t].double().T + gates.gamma.bias[h]
            log_n = math.log(int(pos[t]) + 2)
            f = 0.7 + (1 + beta.exp()).log() * log_n ** (1.5 * gamma.tanh())
            want[:, h, t] = f.detach()[:, None] * q[:, h, t].double()
    close(got, want, 3e-5)  # relative 1e-6 of up to 20: a gate times ln(n)^1.5
    assert sum(p.numel() for p in scheme.parameters()) == 2 * (E + 1) * H


def test_adaptive_scale_starts_near_one_gate():
    f = AdaptiveScale(SITE, Nope).prepare(
        torch.zeros(1, S, E), *[torch.ones(1, H, S, D)] * 3, torch.arange(S), None
    )[0]
    close(f, torch.full(f.shape, 1 + math.log(2)), 1e-6)  # softplus(0), power 0


def sia_by_loops(z, i, j, tau):
    want = torch.zeros(z.shape, dtype=torch.float64)
    for t in range(len(i)):
        for s in range(len(j)):
            far = math.log(1 + max(0, int(i[t] - j[s])) / tau)
            want[:, :, t, s] = math.sqrt(1 + 2 * far) * z[:, :, t, s].double() - 2 * far
    return want


@pytest.mark.parametrize("tau", [0.5, 10.0])
def test_sia_equals_loops(tau):
    scheme = Sia(SITE, Nope, tau)
    j = torch.arange(3, 3 + S)
    z = torch.randn(B, H, T, S)
    got = scheme.scores(z, *qkv()[:2], j[-T:], j, None)
    close(got, sia_by_loops(z, j[-T:], j, tau), 5e-6)  # up to 3 * 2.7 and - 6
    own = torch.arange(T), torch.arange(S - T, S)
    assert torch.equal(got[:, :, own[0], own[1]], z[:, :, own[0], own[1]])


def test_sia_evens_out_decades():
    """Under scores of unit variance, the mean weight e^z at distance d is e^(1/2) / (1 + d / tau),
    so that d..2d has about the same sum for every large d."""
    scheme, n = Sia(Site(E, 1, D, 16), Nope), 20000
    j = torch.tensor([0])
    for d in (0, 30, 300):
        z = scheme.scores(torch.randn(n, 1, 1, 1), NO_X, NO_X, torch.tensor([d]), j, None)
        # half a dozen standard errors of a lognormal mean, whose spread grows with d
        rel = 6 * math.sqrt(math.expm1(1 + 2 * math.log1p(d / 10)) / n)
        assert z.exp().mean().item() == pytest.approx(math.exp(0.5) / (1 + d / 10), rel=rel)


def test_sia_has_no_fold_and_takes_the_inner_bias():
    scheme = Sia(SITE, Alibi)
    assert not scheme.overrides("fold")
    assert not Sia(SITE, Shaw).overrides("far")
    assert failures(partial(Sia, over=Alibi)) == []


def entmax_by_bisection(z):
    """Weights of one row in float64: t between -1 and 0 by halving."""
    half = z.double() / 2
    half = half - half.max()
    low, high = -1.0, 0.0
    for _ in range(80):
        t = (low + high) / 2
        if (half - t).clamp(min=0).square().sum() > 1:
            low = t
        else:
            high = t
    return (half - low).clamp(min=0).square()


def test_entmax_golden():
    values = golden("temperature")["entmax15"]
    close(entmax15(torch.tensor(values["z"])), values["out"], 2e-7)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("size", [1, 2, 9, 255, 256, 257, 2000])
def test_entmax_equals_bisection(scale, size):
    z = scale * torch.randn(3, size)
    got = entmax15(z)
    # A row sums to 1, so that a weight has the absolute rounding of t times 2 sqrt(p).
    close(got, torch.stack([entmax_by_bisection(row) for row in z]), 1e-6)
    close(got.sum(-1), torch.ones(3), 2e-6)


def test_entmax_equals_the_package():
    entmax = pytest.importorskip("entmax")
    z = torch.randn(4, 3, 50, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 50, dtype=torch.float64)
    want = entmax.entmax15(3 * z, dim=-1)
    (expected,) = torch.autograd.grad((want * weight).sum(), z)
    got = entmax15(3 * z)
    (gradient,) = torch.autograd.grad((got * weight).sum(), z)
    close(got, want.detach(), 1e-12)
    close(gradient, expected, 1e-12)


def test_entmax_gradient_and_masked_keys():
    z = torch.randn(2, 6, dtype=torch.float64)
    masked = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.bool)

    def visible(z):
        return entmax15(z.masked_fill(masked, -torch.inf))

    p = visible(z)
    assert (p[:, masked] == 0).all()
    close(p[:, ~masked], entmax15(z[:, ~masked]), 1e-15)
    assert torch.autograd.gradcheck(visible, (z.requires_grad_(),))
    alone = entmax15(torch.tensor([[-torch.inf, 3.0, -torch.inf]]))
    assert alone.tolist() == [[0, 1, 0]]


def test_entmax_leaves_the_scores_as_they_were():
    z = torch.randn(3, 5)
    before = z.clone()
    entmax15(z)
    assert torch.equal(z, before)


def test_entmax_in_half_precision():
    z = torch.randn(2, H, T, S)
    p = Entmax(SITE, Nope).normalize(z.bfloat16())
    assert p.dtype == torch.float32
    close(p, entmax15(z.bfloat16().float()), 0)


def adatemp_by_loops(z, threshold=0.5):
    """One row in float64."""
    z = z.double()
    p = z.softmax(-1)
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    beta = sum(c * entropy ** (4 - power) for power, c in enumerate(ADATEMP))
    return (z * max(1.0, beta) if entropy > threshold else z).softmax(-1), entropy, beta


def test_adatemp_equals_loops():
    changed = temperature.adatemp(Nope(SITE), 64)
    flat = torch.cat([torch.zeros(1, 700), torch.zeros(1, 700)])
    rows = [
        torch.tensor([0.0, 1.0, 2.0, 0.5]),
        torch.tensor([0.0, 20.0, 0.0, -torch.inf]),  # sharp: left as it is
        torch.randn(60),
        flat[0],  # flatter than the polynomial knows
    ]
    kinds = set()
    for z in rows:
        want, entropy, beta = adatemp_by_loops(z)
        kinds.add((entropy > 0.5, beta > 1))
        close(changed.normalize(z[None, None, None])[0, 0, 0], want, 1e-6)
    assert kinds == {(True, True), (False, False), (True, False)}


def test_adatemp_polynomial_is_above_one_where_the_docstring_says():
    at = {e: sum(c * e ** (4 - n) for n, c in enumerate(ADATEMP)) for e in (0.84, 0.86, 5.94, 5.95)}
    assert [beta > 1 for beta in at.values()] == [False, True, True, False]


def test_adatemp_keeps_the_inner_softmax():
    """Around entmax, both the entropy and the weights are those of entmax."""
    z = torch.randn(1, 1, 1, 30)
    p = entmax15(z)
    entropy = -(p[p > 0] * p[p > 0].log()).sum().item()
    beta = max(1.0, sum(c * entropy ** (4 - n) for n, c in enumerate(ADATEMP)))
    changed = temperature.adatemp(Entmax(SITE, Nope), 64)
    close(changed.normalize(z), entmax15(beta * z), 2e-6)


def test_logn_extension_leaves_training_as_it_was():
    scheme, n = Rope(SITE), 4 * SITE.train_len
    changed = temperature.logn(scheme, n)
    pos = torch.arange(n)
    q, k, v = qkv(n)
    before = scheme.prepare(NO_X, q, k, v, pos, None)[0]
    after = changed.prepare(NO_X, q, k, v, pos, None)[0]
    L = SITE.train_len
    close(after[:, :, :L], before[:, :, :L], 1e-6)  # ln L / ln L
    close(after[:, :, -1], 1.5 * before[:, :, -1].double(), 1e-5)  # ln 64 / ln 16
    whole = temperature.logn(Alibi(SITE), n, scale_bias=True)
    assert whole.overrides("scores")
    assert not temperature.logn(Alibi(SITE), n).overrides("scores")


@pytest.mark.parametrize(
    ("extension", "inner"), [(temperature.logn, Alibi), (temperature.adatemp, T5)]
)
def test_extensions_pass_conformance_and_copy(extension, inner):
    def make(site):
        return extension(inner(site), 4 * site.train_len)

    assert failures(make) == []
    scheme = T5(SITE)
    changed = extension(scheme, 64)
    assert changed.over is not scheme
    assert torch.equal(changed.over.weight, scheme.weight)
    assert changed.shared


def test_positions_that_count_no_keys_are_refused():
    for kind in (Logn, Ssmax, Llama4, AdaptiveScale):
        with pytest.raises(UserError, match="by their positions, and Drawn"):
            kind(SITE, Drawn)
    with pytest.raises(UserError, match="logn: it counts"):
        temperature.logn(Drawn(SITE), 64)
    assert HeadScale(SITE, Drawn).overrides("positions")
    assert Sia(SITE, Drawn).overrides("positions")


def test_a_second_softmax_is_refused():
    for outer in (Entmax, AttnSink):
        for inner in (Entmax, AttnSink, Adatemp):
            with pytest.raises(UserError, match=r"changes the softmax, which \w+ has changed"):
                outer(SITE, partial(inner, over=Nope))


def test_bad_parameters_are_refused():
    with pytest.raises(UserError, match="floor_scale is 0; it must be at least 1"):
        Llama4(SITE, Nope, floor_scale=0)
    with pytest.raises(UserError, match="offset is 2; use 1"):
        Llama4(SITE, Nope, offset=2)
    with pytest.raises(UserError, match=r"tau is 0\.0; it must be above 0"):
        Sia(SITE, Nope, tau=0.0)


def test_factors_have_the_precision_of_the_model_and_at_least_float32():
    pos = torch.tensor([8190, 8191])
    for kind in TEMPERATURES:
        scheme = kind(SITE, Nope)
        exact = copy.deepcopy(scheme).double().factor((pos + 1.0).double()[None])
        half = copy.deepcopy(scheme).bfloat16()
        q = torch.ones(1, H, 2, D, dtype=torch.bfloat16)
        n = temperature.visible(pos, q)
        assert n.dtype == torch.float32
        assert n.tolist() == [[8191, 8192]]
        assert half.prepare(NO_X, q, q, q, pos, None)[0].dtype == torch.bfloat16
        # s itself is a bfloat16 number, of 8 bits
        torch.testing.assert_close(half.factor(n).double(), exact.double(), rtol=4e-3, atol=0)
