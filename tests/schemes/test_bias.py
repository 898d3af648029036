"""Score biases against formulas and published code."""

import copy
import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, E, H, S, T, close, golden
from torch import nn

from posx import conformance
from posx.attention import choose_path
from posx.conformance import Subject, stirred
from posx.errors import UserError
from posx.schemes.base import Site
from posx.schemes.bias import (
    T5,
    Alibi,
    AlibiLearned,
    Bam,
    Fire,
    KerpleLog,
    KerplePower,
    Sandwich,
    Tisa,
    alibi_interp,
    alibi_slopes,
    bucket_starts,
)
from posx.schemes.hybrid import LinearAlibi

BY_DISTANCE = [Alibi, T5, AlibiLearned, KerpleLog, KerplePower, Sandwich, Tisa, Bam]


def of_distances(scheme, d):
    """The bias of each distance: (H, len(d))."""
    return scheme.distance_bias(torch.as_tensor(d)).detach()


def test_alibi_slopes_golden():
    slopes = golden("alibi")["slopes"]
    assert {"1", "3", "6", "8", "12"} <= set(slopes)
    for n_heads, want in slopes.items():
        assert alibi_slopes(int(n_heads)) == pytest.approx(want, rel=1e-7)  # float32 digits


def test_alibi_slopes_equal_x_transformers(oracle):
    for n_heads in range(1, 34):
        want = oracle.AlibiPositionalBias._get_slopes(n_heads)
        assert alibi_slopes(n_heads) == pytest.approx(want, rel=1e-12)


def test_alibi_golden_block():
    want = torch.tensor(golden("alibi")["bias_h4_q_rows_2..4_k_0..4"])  # (4, 3, 5)
    distance = torch.arange(2, 5)[:, None] - torch.arange(5)  # (3, 5)
    got = Alibi(Site(32, 4, 8, 16)).distance_bias(distance.clamp(min=0))
    past = (distance >= 0).expand_as(got)
    assert torch.equal(got[past], want[past])  # powers of two: exact


@pytest.mark.parametrize("make", BY_DISTANCE)
def test_distance_bias_takes_any_shape(make):
    scheme = stirred(make(SITE))
    d = torch.randint(0, 300, (B, T, S))
    want = scheme.distance_bias(d)
    assert want.shape == (H, B, T, S)
    assert want.dtype == torch.float32
    assert torch.equal(scheme.distance_bias(d.double()), want)
    # torch's exp, log and powers differ in the last digit between whole vectors and what is left
    for got, same in (
        (scheme.distance_bias(d.transpose(0, 2)), want.transpose(1, 3)),
        (scheme.distance_bias(d[1, 2, 3]), want[:, 1, 2, 3]),
    ):
        torch.testing.assert_close(got, same, rtol=3e-7, atol=1e-7)
    half = copy.deepcopy(scheme).to(torch.bfloat16).distance_bias(d)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("make", BY_DISTANCE)
def test_distance_bias_has_the_precision_of_the_model_and_at_least_float32(make):
    scheme = make(SITE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        got = copy.deepcopy(scheme).to(dtype).distance_bias(torch.arange(S))
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_alibi_in_float64_is_exact():
    n_heads, d = 12, torch.tensor([0, 1, 2, 8192])
    scheme = Alibi(Site(96, n_heads, 8, 16)).bfloat16().double()
    want = -torch.tensor(alibi_slopes(n_heads), dtype=torch.float64)[:, None] * d
    assert torch.equal(scheme.distance_bias(d), want)
    extra_q, extra_k = scheme.fold(d, None)
    assert extra_q.dtype == extra_k.dtype == torch.float64


def test_alibi_formula_and_precision():
    n_heads, d = 12, torch.tensor([0, 1, 2, 8192])
    scheme = Alibi(Site(96, n_heads, 8, 16))
    want = -torch.tensor(alibi_slopes(n_heads), dtype=torch.float64)[:, None] * d
    for changed in (scheme, copy.deepcopy(scheme).to(torch.bfloat16)):
        got = changed.distance_bias(d)
        assert (got[:, 0] == 0).all()
        # float32: half a unit of 6e-8, once for the slope and once for the product
        torch.testing.assert_close(got.double(), want, rtol=1.2e-7, atol=0)
    cast = -torch.tensor(alibi_slopes(n_heads)).bfloat16().double()[:, None] * d
    assert 0.5 < (cast - want).abs().max() < 0.7  # what the precision protects from


def test_alibi_steep_head_is_a_window():
    bias = Alibi(Site(64, 8, 8, 16)).distance_bias(torch.arange(400))[0]  # slope 1/2
    weight = bias.softmax(-1)
    assert weight[150] > 0
    assert (weight[250:] == 0).all()


@pytest.mark.parametrize("first", [0, 50])
def test_alibi_fold_is_the_bias_up_to_a_constant_a_row(first):
    scheme = Alibi(SITE)
    pos = torch.arange(first, first + S)
    extra_q, extra_k = scheme.fold(pos, None)
    assert extra_q.shape == extra_k.shape == (1, H, S, 1)
    folded = (extra_q @ extra_k.transpose(-1, -2) / math.sqrt(D))[0]  # (H, S, S)
    bias = scheme.distance_bias((pos[:, None] - pos).clamp(min=0))
    past = pos <= pos[:, None]
    apart = folded - folded.diagonal(dim1=1, dim2=2)[..., None]  # the row's own key at zero
    close(torch.where(past, apart, 0), torch.where(past, bias, 0), atol=1e-5)  # products near 60


def test_t5_buckets_golden():
    values = golden("t5_buckets")
    scheme = T5(SITE)
    near = values["distance_0_to_140_buckets32_max128"]
    assert scheme.bucket(torch.arange(141)).tolist() == near
    far = values["far"]
    assert scheme.bucket(torch.tensor(far["distances"])).tolist() == far["buckets"]
    starts = {int(b): d for b, d in values["first_distance_of_each_bucket"].items()}
    assert dict(enumerate(bucket_starts(32, 128))) == starts
    other = values["buckets16_max64_distance_0_to_80"]
    assert T5(SITE, buckets=16, max_distance=64).bucket(torch.arange(81)).tolist() == other


def test_t5_buckets_equal_x_transformers(oracle):
    d = torch.arange(3000)
    for buckets, max_distance in ((32, 128), (32, 1000), (10, 77)):
        want = oracle.RelativePositionBias._relative_position_bucket(
            -d, causal=True, num_buckets=buckets, max_distance=max_distance
        )
        assert torch.equal(T5(SITE, buckets, max_distance).bucket(d), want)


def test_t5_bucket_edges_are_exact():
    """4 * 16^(c/4) is a whole number, where a rounded logarithm may fall on the wrong side."""
    assert bucket_starts(8, 64) == [0, 1, 2, 3, 4, 8, 16, 32]
    assert bucket_starts(7, 48) == [0, 1, 2, 3, 6, 12, 24]


def test_t5_bias_is_the_weight_of_the_bucket():
    scheme = T5(SITE)
    d = torch.arange(200)
    bias = scheme.distance_bias(d)
    for distance in range(200):
        if distance < 16:
            bucket = distance
        else:
            bucket = min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))
        assert torch.equal(bias[:, distance], scheme.weight[bucket])
    bias.sum().backward()
    assert (scheme.weight.grad > 0).all()
    wide = T5(Site(E, 1000, D, 16), init_std=0.5).weight
    assert wide.std().item() == pytest.approx(0.5, rel=0.02)  # 32000 draws: 0.4 %


def test_t5_refuses_impossible_buckets():
    with pytest.raises(UserError, match="buckets 32 and max_distance 16"):
        T5(SITE, max_distance=16)
    with pytest.raises(UserError, match="buckets 1 "):
        T5(SITE, buckets=1)


@pytest.mark.parametrize(
    ("make", "count", "shared"),
    [
        (Alibi, 0, False),
        (AlibiLearned, H, True),
        (T5, 32 * H, True),
        (KerpleLog, 2 * H, True),
        (KerplePower, 2 * H, True),
        (Fire, 2 * 32 + 33 * H + 2, False),
        (Sandwich, 0, False),
        (Tisa, 15 * H, False),
        (Bam, 2 * H, False),
    ],
)
def test_parameters_are_as_many_as_documented(make, count, shared):
    scheme = make(SITE)
    assert sum(p.numel() for p in scheme.parameters()) == count
    assert scheme.shared == shared
    assert all(p.requires_grad for p in scheme.parameters())


def test_learned_alibi_starts_as_alibi_and_equals_x_transformers(oracle):
    scheme, d = AlibiLearned(SITE), torch.arange(300)
    assert torch.equal(of_distances(scheme, d), of_distances(Alibi(SITE), d))
    with torch.no_grad():
        scheme.log_scale.copy_(torch.tensor([-1.0, 0.5, 2.0]))
    slopes = [m * math.exp(t) for m, t in zip(alibi_slopes(H), (-1, 0.5, 2), strict=True)]
    want = oracle.AlibiPositionalBias(H, slopes=slopes)(1, S)[:, 0].flip(-1)  # (H, S)
    close(of_distances(scheme, torch.arange(S)), want, atol=1e-6)  # biases up to 15
    assert choose_path(scheme, S, S, training=True) == "folded"


def test_learned_slopes_get_their_gradient():
    scheme, d = AlibiLearned(SITE), torch.arange(S)
    scheme.distance_bias(d).sum().backward()
    want = [-m * d.sum().item() for m in alibi_slopes(H)]  # d/dt of -m e^t d at t = 0
    close(scheme.log_scale.grad, want, atol=1e-6)


@pytest.mark.parametrize(("make", "name"), [(KerpleLog, "log"), (KerplePower, "power")])
def test_kerple_golden(make, name):
    values = golden("kerple")
    want = values[name]
    scheme = make(Site(32, 4, 8, 16))
    with torch.no_grad():
        scheme.p.copy_(torch.tensor(want["p"]))
        scheme.a.copy_(torch.tensor(want["a"]))
    got = of_distances(scheme, values["distances"])
    want = torch.tensor(want["bias_heads_x_distances"])
    # float32 here and there: a unit or two of 1.2e-7, at 5e5 in the largest of the power kernel
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [KerpleLog, KerplePower])
def test_kerple_starts_uniform(make):
    scheme = make(Site(E, 4000, D, 16))
    for values, top in ((scheme.p, 2), (scheme.a, 1)):
        assert values.min() >= 0
        assert values.max() <= top
        # a uniform mean is off by top / sqrt(12 * 4000), 0.5 % of top; five times that
        assert values.mean().item() == pytest.approx(top / 2, abs=0.025 * top)
        assert values.std().item() == pytest.approx(top / math.sqrt(12), rel=0.05)


def test_kerple_reads_its_parameters_clamped():
    d = torch.tensor([1.0, 5.0])
    for make, p_read, want in (
        (KerpleLog, (0.01, 0.01, 3.0), lambda p, a: -p * math.log(1 + a * 5)),
        (KerplePower, (0.01, 0.01, 2.0), lambda p, a: -a * 5**p),
    ):
        scheme = make(SITE)
        with torch.no_grad():
            scheme.p.copy_(torch.tensor([-1.0, 0.0, 3.0]))
            scheme.a.copy_(torch.tensor([-1.0, 0.5, 0.001]))
        expected = [want(p, a) for p, a in zip(p_read, (0.01, 0.5, 0.01), strict=True)]
        close(of_distances(scheme, d)[:, 1], expected, atol=1e-6)


def test_a_clamped_kerple_parameter_can_come_back_but_not_leave_further():
    scheme = KerplePower(SITE)
    for inward in (True, False):
        for name, value, sign in (("p", -0.5, 1), ("p", 2.5, -1), ("a", -0.5, 1)):
            with torch.no_grad():
                scheme.p.fill_(1.0)
                scheme.a.fill_(0.5)
                getattr(scheme, name).fill_(value)
            scheme.zero_grad()
            bias = scheme.distance_bias(torch.arange(2, 9)).sum()  # falls with p and with a
            # a step against the gradient must lead to `sign`
            (bias * (sign if inward else -sign)).backward()
            gradient = getattr(scheme, name).grad
            assert (gradient * sign < 0).all() if inward else (gradient == 0).all()


@pytest.mark.parametrize("make", [KerpleLog, KerplePower])
def test_kerple_gradients_equal_differences(make):
    scheme = make(SITE).double()
    with torch.no_grad():
        scheme.p.copy_(torch.tensor([0.3, 1.0, 1.7]))
        scheme.a.copy_(torch.tensor([0.02, 0.4, 0.9]))
    d = torch.arange(S, dtype=torch.float64)  # from 0 on, where d^p has no derivative by d
    values = scheme.p[:, None], scheme.a[:, None]
    assert torch.autograd.gradcheck(lambda p, a: scheme.kernel(d, p, a), values)


def fire_bias(scheme, i, j):
    """The bias by the formula, hidden units and all, in float64: (H, T, S)."""
    c, start = abs(scheme.c.item()), abs(scheme.factor.item()) * scheme.threshold
    weight, shift = scheme.hidden.weight.double(), scheme.hidden.bias.double()
    out = torch.zeros(scheme.site.n_heads, len(i), len(j), dtype=torch.float64)
    for t, query in enumerate(i.tolist()):
        for s, key in enumerate(j.tolist()):
            d = max(0, query - key)
            x = math.log(c * d + 1) / (math.log(c * max(query, start) + 1) + 1e-6)
            hidden = (weight[:, 0] * x + shift).relu()
            out[:, t, s] = scheme.out.weight.double() @ hidden + scheme.out.bias.double()
    return out


def fire_scores(scheme, i, j):
    """What it adds to scores of zero: (H, T, S) or (B, H, T, S)."""
    z = torch.zeros(*i.shape[:-1], H, i.shape[-1], j.shape[-1], dtype=scheme.c.dtype)
    return scheme.scores(z, NO_X, NO_X, i, j, None)


def test_fire_golden():
    values = golden("fire")
    weights = values["weights"]
    scheme = Fire(Site(32, 4, 8, 16), width=8, threshold=512)
    with torch.no_grad():
        scheme.hidden.weight.copy_(torch.tensor(weights["l1.weight (W)"])[:, None])
        scheme.hidden.bias.copy_(torch.tensor(weights["l1.bias"]))
        scheme.out.weight.copy_(torch.tensor(weights["l2.weight (H,W)"]))
        scheme.out.bias.copy_(torch.tensor(weights["l2.bias"]))
    assert scheme.c.item() == pytest.approx(weights["c"])
    rows = {"L8_last_query_row": 7, "L512_last_query_row": 511, "L1024_last_query_row": 1023}
    assert values.keys() > rows.keys()
    for name, query in {**rows, "L1024_query_600": 600}.items():
        row = values[name]
        keys = torch.tensor(row["key_index"])
        z = torch.zeros(1, 4, 1, len(keys))
        got = scheme.scores(z, NO_X, NO_X, torch.tensor([query]), keys, None)[0, :, 0]
        want = row.get("bias_heads_x_keys") or row["bias"]
        close(got, want, atol=1e-6)  # float32 sums of 8 products below 1


@pytest.mark.parametrize("n_queries", [1, T, S])
@pytest.mark.parametrize("first", [0, 12, 4000])
def test_fire_equals_its_mlp(n_queries, first):
    scheme = stirred(Fire(SITE, width=7))
    with torch.no_grad():
        scheme.hidden.weight[:3] = torch.tensor([[0.0], [0.0], [2.0]])
        scheme.hidden.bias[:3] = torch.tensor([0.5, -0.5, -1.0])  # always on, never on, from 0.5 on
        scheme.factor.fill_(-0.8)
    j = torch.arange(first, first + S)
    got = fire_scores(scheme, j[-n_queries:], j)
    close(got, fire_bias(scheme, j[-n_queries:], j).detach(), atol=3e-6)  # 7 products of order 1


def test_fire_takes_positions_of_each_sequence():
    scheme = stirred(Fire(SITE))
    j = torch.stack([torch.arange(S) * 3, torch.arange(S) + 40])  # (2, S)
    got = fire_scores(scheme, j[:, -T:], j)
    for b in range(2):
        assert torch.equal(got[b], fire_scores(scheme, j[b, -T:], j[b]))


def test_fire_gradients_are_those_of_its_mlp():
    """Straight pieces and hidden units have the same derivative, c and the threshold included."""
    scheme = stirred(Fire(SITE, width=7)).double()
    other = copy.deepcopy(scheme)
    j = torch.arange(2 * SITE.train_len)
    direction = torch.randn(H, len(j), len(j), dtype=torch.float64).tril()
    (fire_scores(scheme, j, j) * direction).sum().backward()
    d = (j[:, None] - j).clamp(min=0)
    longest = torch.maximum(j.double(), other.factor.abs() * other.threshold)[:, None]
    x = (other.c.abs() * d).log1p() / ((other.c.abs() * longest).log1p() + 1e-6)
    mlp = nn.Sequential(other.hidden, nn.ReLU(), other.out)
    (mlp(x[..., None]).permute(2, 0, 1) * direction).sum().backward()
    for (name, got), want in zip(scheme.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)
        assert (got.grad != 0).any(), name


def test_fire_interpolates_beyond_the_threshold():
    """The first token always has the argument psi(i) / psi(i) = 1, once i is past the threshold."""
    scheme = Fire(SITE)
    assert scheme.threshold == SITE.train_len
    j = torch.arange(3 * SITE.train_len)
    first = fire_scores(scheme, j, j)[..., 0].detach()  # (H, T)
    past = first[:, SITE.train_len :]
    close(past, past[:, -1:].expand_as(past), atol=1e-6)
    assert (first[:, 1:4] - past[:, :1]).abs().min() > 1e-3
    assert Fire(SITE, threshold=5).threshold == 5


def test_fire_refuses_what_cannot_be():
    with pytest.raises(UserError, match="width 0 and threshold 16"):
        Fire(SITE, width=0)
    with pytest.raises(UserError, match="width 32 and threshold 0"):
        Fire(SITE, threshold=0)
    with pytest.raises(UserError, match=r"c is 0\.0"):
        Fire(SITE, c=0.0)


def test_sandwich_golden():
    values = golden("sandwich")
    for name in ("H4_dbar128", "H8_dbar64", "H12_dbar64", "H8_dbar16"):
        n_heads, d_bar = (int(part) for part in name[1:].split("_dbar"))
        scheme = Sandwich(Site(D * n_heads, n_heads, D, 16), d_bar=d_bar)
        # NeMo's float32 angles of distance 1000 are off by 3e-5
        close(of_distances(scheme, values["distances"]), values[name], atol=1e-4)


def test_sandwich_is_exact_far_away_and_in_parts():
    """Angles of 100000 rad need float64; more distances than fit into one part change nothing."""
    scheme = Sandwich(SITE, d_bar=6, base=100.0)
    d = torch.randint(0, 100_000, (5, 4001))
    got = scheme.distance_bias(d)
    for row, column in ((0, 0), (2, 190), (2, 191), (4, 4000)):  # 2 * 4001 + 190 = 8192
        angles = [d[row, column].item() * 100 ** (-2 * c / 6) for c in (1, 2, 3)]
        fall = sum(math.cos(angle) for angle in angles) - 3
        want = [fall * H / (8 * h) for h in range(1, H + 1)]
        close(got[:, row, column], want, atol=5e-7)


def test_sandwich_folds():
    scheme = Sandwich(SITE, d_bar=10)
    for pos in (torch.arange(7, 7 + S), torch.stack([torch.arange(S) * 2, torch.arange(S) + 50])):
        query, key = scheme.fold(pos, None)
        assert query.shape == key.shape == (len(pos) if pos.ndim == 2 else 1, H, S, 10)
        folded = query @ key.mT / math.sqrt(D)  # (1 or B, H, S, S)
        apart = folded - folded.diagonal(dim1=-2, dim2=-1)[..., None]
        past = (pos[..., :, None] - pos[..., None, :]).clamp(min=0)
        want = scheme.distance_bias(past).movedim(0, -3)
        close(apart.tril(), want.tril().expand_as(apart), atol=2e-6)  # products below 2


def test_sandwich_refuses_what_cannot_be():
    for d_bar in (0, 7):
        with pytest.raises(UserError, match=f"d_bar is {d_bar}; it must be even"):
            Sandwich(SITE, d_bar=d_bar)
    with pytest.raises(UserError, match="base is 1"):
        Sandwich(SITE, base=1)


def test_tisa_equals_loops():
    scheme = stirred(Tisa(SITE, kernels=4))
    got = of_distances(scheme, torch.arange(30))
    for h in range(H):
        for d in range(30):
            want = 0.0
            for s in range(4):
                a, b, c = (x[s, h].item() for x in (scheme.height, scheme.sharpness, scheme.place))
                want += a * math.exp(-abs(b) * (d - c) ** 2)
            assert got[h, d].item() == pytest.approx(want, abs=1e-6)


def test_tisa_starts_as_its_code_and_ends():
    scheme = Tisa(Site(E, 2000, D, 16))
    for parameter, mean, std in (
        (scheme.height, 0.1, 0.01),
        (scheme.sharpness, 0.1, 0.01),
        (scheme.place, 0.0, 5.0),
    ):  # 10000 draws: the mean is off by std / 100, the deviation by 0.7 %
        assert parameter.mean().item() == pytest.approx(mean, abs=0.05 * std)
        assert parameter.std().item() == pytest.approx(std, rel=0.04)
    assert (of_distances(scheme, [1000]) == 0).all()
    with pytest.raises(UserError, match="kernels is 0"):
        Tisa(SITE, kernels=0)


def test_bam_formula():
    scheme = Bam(SITE, train_mu=True)
    alpha, beta, theta = [0.3, -1.0, 0.0], [1.5, 0.4, -0.5], [0.0, 0.7, -0.2]
    with torch.no_grad():
        scheme.alpha.copy_(torch.tensor(alpha))
        scheme.beta.copy_(torch.tensor(beta))
        scheme.theta.copy_(torch.tensor(theta))
    got = of_distances(scheme, torch.arange(20))
    for h in range(H):
        mu = math.exp(theta[h]) - math.exp(-theta[h])
        for d in range(1, 20):
            offset = -d  # j - i
            want = -math.exp(alpha[h]) * (abs(offset - mu) + 1e-5) ** beta[h]
            assert got[h, d].item() == pytest.approx(want, rel=1e-5)


def test_bam_starts_as_nope_or_as_alibi():
    d = torch.arange(500)
    assert (of_distances(Bam(SITE), d) == -1).all()  # the same for all keys: no position
    start = Bam(SITE, alpha_init=None, beta_init=1.0)
    # 1e-5 beside d, and float32 of a logarithm and back
    close(of_distances(start, d), of_distances(Alibi(SITE), d).double(), atol=5e-5)
    assert Bam(SITE).theta is None
    assert sum(p.numel() for p in Bam(SITE, train_mu=True).parameters()) == 3 * H


@pytest.mark.parametrize("make", [Alibi, AlibiLearned, LinearAlibi])
def test_alibi_interp_scales_the_slopes(make):
    scheme, d = stirred(make(SITE)), torch.arange(4 * SITE.train_len)
    before = of_distances(scheme, d)
    changed = alibi_interp(scheme, 4 * SITE.train_len)
    assert type(changed) is make
    close(of_distances(changed, d), before.double() / 4, atol=1e-7 * before.abs().max().item())
    assert torch.equal(of_distances(scheme, d), before)
    for length in (1, SITE.train_len):
        assert torch.equal(of_distances(alibi_interp(changed, length), d), before)
    products = [(q @ k.mT)[0].detach() for q, k in (scheme.fold(d, None), changed.fold(d, None))]
    close(products[1] * 4, products[0], atol=3e-7 * products[0].abs().max().item())


def test_extended_alibi_passes_conformance():
    def make(site):
        return alibi_interp(Alibi(site), 4 * site.train_len)

    results = conformance.run(Subject("mine", make, "Mine: a scheme of a test"))
    assert [f"{each.check}: {each.message}" for each in results if not each.passed] == []
