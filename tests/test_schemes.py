"""Numbers, traits and errors of the schemes and extensions, against formulas and published code.

Sizes are all different, so that a wrong broadcast cannot pass: B=2, H=3, T=5, D=8.
"""

import copy
import inspect
import itertools
import json
import math
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from posx.errors import UserError
from posx.paths import config_dir
from posx.schemes import frequencies
from posx.schemes.absolute import Learned, Sinusoidal, clip, interpolate, sinusoids
from posx.schemes.base import HOOKS, Nope, Scheme, Site
from posx.schemes.bias import T5, Alibi, alibi_slopes, bucket_starts
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import DynamicRope, Rope, dynamic, ntk, pi, yarn

B, H, T, S, D = 2, 3, 5, 9, 8
E = 24
SITE = Site(d_model=E, n_heads=H, d_head=D, train_len=16)
NO_X = torch.empty(0)  # rotary schemes do not read x

# name of the yaml: (class, the hooks it overrides, enters, parameters it trains)
EXPECTED = {
    "nope": (Nope, set(), "mask", 0),
    "sinusoidal": (Sinusoidal, {"embed"}, "input", 0),
    "learned": (Learned, {"embed"}, "input", 16 * E),
    "rope": (Rope, {"prepare"}, "q/k", 0),
    "alibi": (Alibi, {"distance_bias", "fold"}, "score", 0),
    "shaw": (Shaw, {"scores", "value"}, "score+value", 2 * 33 * D),
    "t5": (T5, {"distance_bias"}, "score", 32 * H),
    "window": (Window, {"mask"}, "mask", 0),
}
EXTENSIONS = {
    "interpolate": interpolate,
    "clip": clip,
    "pi": pi,
    "ntk": ntk,
    "dynamic": dynamic,
    "yarn": yarn,
    "yarn_scaled": yarn,
    "yarn_pairs": yarn,
}


@pytest.fixture
def oracle():
    """x-transformers; its import warns about torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers.x_transformers")


def golden(name: str) -> dict:
    """Values of published implementations, 9 digits of float32; each file says which."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def close(got: torch.Tensor, want, atol: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), want, atol=atol, rtol=0)


def turn(scheme: Rope, q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor):
    """q and k after the scheme. (B, H, T, D)"""
    q, k, v, state = scheme.prepare(NO_X, q, k, NO_X, pos)
    assert v is NO_X
    assert state is None
    return q, k


# -- what every scheme declares ------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_scheme_enters_where_it_says(name):
    cls, hooks, enters, n_parameters = EXPECTED[name]
    scheme = cls(SITE)
    assert {hook for hook in HOOKS if scheme.overrides(hook)} == hooks
    assert scheme.enters == enters
    assert sum(p.numel() for p in scheme.parameters()) == n_parameters
    assert set(scheme.state_dict()) == {n for n, _ in scheme.named_parameters()}  # no tables saved


def test_traits():
    relative = {name for name, (cls, *_) in EXPECTED.items() if cls.relative}
    assert relative == {"rope", "alibi", "shaw", "t5", "window"}
    assert {name for name, (cls, *_) in EXPECTED.items() if cls.shared} == {"learned", "t5"}
    limited = {name for name, (cls, *_) in EXPECTED.items() if cls(SITE).max_len is not None}
    assert limited == {"learned"}
    assert (DynamicRope.length_dependent, DynamicRope.kv) == (True, False)
    assert (Rope.length_dependent, Rope.kv) == (False, True)


@pytest.mark.parametrize(
    ("group", "name"),
    [("scheme", name) for name in EXPECTED] + [("extension", name) for name in EXTENSIONS],
)
def test_yaml_has_card_and_states_every_parameter(group, name):
    path = config_dir() / group / f"{name}.yaml"
    card = path.read_text().splitlines()[0]
    assert card.startswith("# ")
    assert card.isascii()
    assert name == "clip" or "arXiv:" in card
    stated = OmegaConf.to_container(OmegaConf.load(path))
    target = stated.pop("_target_")
    what = EXPECTED[name][0] if group == "scheme" else EXTENSIONS[name]
    assert target == f"{what.__module__}.{what.__name__}"
    given = 1 if group == "scheme" else 2  # site; scheme and length
    parameters = list(inspect.signature(what).parameters.values())[given:]
    defaults = {p.name: p.default for p in parameters}
    if name == "yarn_scaled":
        defaults |= {"beta_fast": None}
    if name == "yarn_pairs":
        defaults |= {"ramp": "pairs"}
    assert stated == defaults


def test_yaml_builds_schemes_and_extensions():
    def load(group, name):
        return OmegaConf.load(config_dir() / group / f"{name}.yaml")

    schemes = {name: instantiate(load("scheme", name), SITE) for name in EXPECTED}
    for name, (cls, *_) in EXPECTED.items():
        assert type(schemes[name]) is cls
    for name, function in EXTENSIONS.items():
        takes = next(iter(inspect.signature(function).parameters.values())).annotation
        scheme = next(s for s in schemes.values() if isinstance(s, takes))
        assert isinstance(instantiate(load("extension", name), scheme, 40), takes)


@pytest.mark.parametrize("name", EXPECTED)
def test_copies_and_shifted_precision_keep_the_scheme(name):
    """bfloat16 casts parameters; fixed numbers stay as they were built, on every path."""
    scheme = EXPECTED[name][0](SITE)
    buffers = {n: b.clone() for n, b in scheme.named_buffers()}
    for changed in (copy.deepcopy(scheme).to(torch.bfloat16), copy.deepcopy(scheme).half().float()):
        assert dict(changed.named_buffers()).keys() == buffers.keys()
        for n, b in changed.named_buffers():
            assert b.dtype == buffers[n].dtype
            assert torch.equal(b, buffers[n])
    cast = copy.deepcopy(scheme).to(torch.bfloat16)
    assert {p.dtype for p in cast.parameters()} <= {torch.bfloat16}
    assert {b.device.type for b in cast.to("meta").buffers()} <= {"meta"}  # they move with it


# -- absolute ------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [4, 8, 16])
def test_sinusoidal_golden(d_model):
    want = torch.tensor(golden("sinusoidal")[f"vaswani_interleaved_d{d_model}_n6"])  # (6, E)
    got = Sinusoidal(Site(d_model, 1, d_model, 6)).embed(
        torch.zeros(B, 6, d_model), torch.arange(6)
    )
    close(got, want.expand(B, 6, d_model), atol=1e-7)  # one float32 rounding


def test_sinusoidal_golden_far_and_odd():
    far = golden("sinusoidal")["vaswani_interleaved_d8_pos"]
    close(sinusoids(torch.tensor(far["positions"]), 8, 1e4, -1), far["values"], atol=1e-7)
    odd = golden("sinusoidal")["odd_d7_n6__distilbert"]
    close(sinusoids(torch.arange(6), 7, 1e4, -1), odd, atol=1e-7)


@pytest.mark.parametrize("d_model", [1, 7, 8])
@pytest.mark.parametrize(("base", "sign"), [(1e4, -1), (50.0, -1), (1e4, 1)])
def test_sinusoidal_formula(d_model, base, sign):
    pos = [0, 1, 3, 100, 8191]
    got = sinusoids(torch.tensor(pos), d_model, base, sign)
    assert got.dtype == torch.float64
    for row, p in enumerate(pos):
        for c in range(d_model):
            angle = p * base ** (sign * 2 * (c // 2) / d_model)
            want = math.sin(angle) if c % 2 == 0 else math.cos(angle)
            # angles reach 8e7, where float64 keeps 1.5e-8
            assert got[row, c].item() == pytest.approx(want, abs=3e-8 if sign > 0 else 1e-11)


def test_sinusoidal_options_reach_the_embedding():
    x, pos = torch.zeros(B, T, E), torch.arange(T)
    for options in ({"base": 50.0}, {"exponent_sign": 1}):
        changed = Sinusoidal(SITE, **options).embed(x, pos)
        assert not torch.allclose(changed, Sinusoidal(SITE).embed(x, pos), atol=0.1)


def test_sinusoidal_shift_is_a_rotation_of_every_pair():
    """u(p + D) = A(D) u(p) with A made from D alone."""
    d_model, shift = 8, 37
    theta = [1e4 ** (-2 * c / d_model) for c in range(d_model // 2)]
    a = torch.zeros(d_model, d_model, dtype=torch.float64)
    for c, w in enumerate(theta):
        cos, sin = math.cos(shift * w), math.sin(shift * w)
        a[2 * c, 2 * c] = a[2 * c + 1, 2 * c + 1] = cos
        a[2 * c, 2 * c + 1], a[2 * c + 1, 2 * c] = sin, -sin
    for p in (0, 1, 500, 100_000):
        here, there = sinusoids(torch.tensor([p, p + shift]), d_model, 1e4, -1)
        close(there, a @ here, atol=1e-10)  # float64 angles near 1e5


def test_sinusoidal_has_no_limit_and_rounds_once():
    pos = torch.arange(100_000, 100_000 + T)
    x = torch.randn(B, T, E)
    scheme = Sinusoidal(SITE)
    exact = sinusoids(pos, E, 1e4, -1)
    close(scheme.embed(x, pos), x.double() + exact, atol=5e-7)  # float32 sum of numbers below 4
    half = scheme.embed(torch.zeros(B, T, E, dtype=torch.bfloat16), pos)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16().expand(B, T, E))


@pytest.mark.parametrize("cls", [Sinusoidal, Learned])
def test_absolute_refuses_wrong_rank_and_width(cls):
    scheme = cls(SITE)
    with pytest.raises(UserError, match=r"shape \(5, 24\).*three axes.*d_model=24"):
        scheme.embed(torch.zeros(T, E), torch.arange(T))
    with pytest.raises(UserError, match=r"25 wide.*d_model=24"):
        scheme.embed(torch.zeros(B, T, 25), torch.arange(T))


def test_sinusoidal_refuses_bad_options():
    with pytest.raises(UserError, match=r"exponent_sign is 0; use -1"):
        Sinusoidal(SITE, exponent_sign=0)
    with pytest.raises(UserError, match=r"base is 1"):
        Sinusoidal(SITE, base=1)


def test_learned_adds_its_rows():
    scheme = Learned(SITE)
    x = torch.randn(B, T, E)
    pos = torch.arange(11, 16)
    got = scheme.embed(x, pos)
    for t in range(T):
        assert torch.equal(got[:, t], x[:, t] + scheme.table[11 + t])
    assert scheme.max_len == 16  # the training length
    longer = Learned(SITE, max_len=20)
    assert longer.max_len == len(longer.table) == 20
    assert Learned(SITE, max_len=4000, init_std=0.02).table.std().item() == pytest.approx(
        0.02,
        rel=0.02,  # 96000 draws: standard error 0.2 %
    )


def test_learned_beyond_its_table_says_what_to_do():
    scheme = Learned(SITE, max_len=7)
    scheme.embed(torch.zeros(B, 7, E), torch.arange(7))
    with pytest.raises(UserError) as error:
        scheme.embed(torch.zeros(B, 8, E), torch.arange(8))
    text = str(error.value)
    for part in ("length 8", "max_len 7", "--extend interpolate", "clip", "scheme.max_len=8"):
        assert part in text
    with pytest.raises(UserError, match="length 8"):  # one token after a cache
        scheme.embed(torch.zeros(B, 1, E), torch.tensor([7]))
    with pytest.raises(UserError, match="max_len is 0"):
        Learned(SITE, max_len=0)


@pytest.mark.parametrize(("rows", "length"), [(5, 6), (5, 13), (2, 7), (1, 4)])
def test_interpolate_is_a_linear_resample(rows, length):
    scheme = Learned(SITE, max_len=rows)
    table = scheme.table.detach().double()
    longer = interpolate(scheme, length)
    assert longer.max_len == len(longer.table) == length
    for p in range(length):
        place = p * (rows - 1) / (length - 1)
        low = min(int(place), rows - 1)
        high = min(low + 1, rows - 1)
        want = table[low] + (place - low) * (table[high] - table[low])
        close(longer.table[p], want, atol=1e-6)  # float32 weights of numbers near 1


def test_clip_repeats_the_last_row():
    scheme = Learned(SITE, max_len=5)
    longer = clip(scheme, 9)
    assert longer.max_len == 9
    assert torch.equal(longer.table[:5], scheme.table)
    assert torch.equal(longer.table[5:], scheme.table[4].expand(4, E))


@pytest.mark.parametrize("extend", [interpolate, clip])
def test_table_extensions_copy_and_leave_enough_alone(extend):
    scheme = Learned(SITE)
    before = scheme.table.detach().clone()
    for length in (3, 16):
        same = extend(scheme, length)
        assert same.max_len == 16
        assert torch.equal(same.table, before)
    longer = extend(scheme, 40)
    longer.embed(torch.zeros(B, 40, E), torch.arange(40)).sum().backward()
    assert longer.table.grad is not None  # it can be trained on
    with torch.no_grad():
        longer.table.zero_()
        same.table.zero_()
    assert torch.equal(scheme.table, before)
    assert scheme.max_len == 16
    assert scheme.table.grad is None


# -- relative vectors ----------------------------------------------------------------------------


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


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_shaw_builds_nothing_larger_than_the_scores():
    n, d_head = 40, 64
    scheme = Shaw(Site(E, H, d_head, 16), k=4)
    pos = torch.arange(n)
    q, z = torch.randn(B, H, n, d_head), torch.zeros(B, H, n, n)
    with Largest() as largest:
        scheme.scores(z, q, q, pos, pos, None)
        scheme.value(z, pos, pos)
    assert z.numel() <= largest.numel <= B * H * n * max(n, d_head) < n * n * d_head


# -- score biases --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("scheme", [Alibi(SITE), T5(SITE)], ids=["alibi", "t5"])
def test_distance_bias_takes_any_shape(scheme):
    d = torch.randint(0, 300, (B, T, S))
    want = scheme.distance_bias(d)
    assert want.shape == (H, B, T, S)
    assert want.dtype == torch.float32
    assert torch.equal(scheme.distance_bias(d.double()), want)
    assert torch.equal(scheme.distance_bias(d.transpose(0, 2)), want.transpose(1, 3))
    assert torch.equal(scheme.distance_bias(d[1, 2, 3]), want[:, 1, 2, 3])
    half = copy.deepcopy(scheme).to(torch.bfloat16).distance_bias(d)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("scheme", [Alibi(SITE), T5(SITE)], ids=["alibi", "t5"])
def test_distance_bias_has_the_precision_of_the_model_and_at_least_float32(scheme):
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


# -- window --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 50])
def test_window_counts_the_token_itself(window):
    scheme = Window(SITE, window)
    assert scheme.band == (0, window)
    j = torch.arange(70, 70 + S)
    i = j[-T:]
    mask = scheme.mask(i, j)
    assert mask.shape == (1, T, S)
    for t in range(T):
        seen = [s for s in range(S) if mask[0, t, s] and j[s] <= i[t]]
        row = S - T + t
        assert seen == list(range(max(0, row - window + 1), row + 1))


def test_window_refuses_zero():
    with pytest.raises(UserError, match="window is 0"):
        Window(SITE, window=0)


# -- rotary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_rope_golden(layout):
    values = golden("rope")[layout]
    scheme = Rope(Site(8, 1, 8, 16), interleaved=layout == "interleaved")
    pos = torch.tensor(values["positions"])
    q, k = (torch.tensor(values[name]).expand(1, 1, len(pos), 8) for name in "qk")
    q, k = turn(scheme, q, k, pos)
    # up to position 2047 both sides have float32 angles, off by 1e-4 there
    close(q[0, 0], values["q_rotated"], atol=1e-4)
    close(k[0, 0], values["k_rotated"], atol=1e-4)
    close((q @ k.transpose(-1, -2))[0, 0], values["scores_q_at_row_k_at_col"], atol=1e-4)


def test_rope_golden_partial():
    values = golden("rope")
    want = values["partial_rotary_first4_of_8_interleaved"]
    pos = torch.tensor(values["interleaved"]["positions"])
    q = torch.tensor(values["interleaved"]["q"]).expand(1, 1, len(pos), 8)
    got, _ = turn(Rope(Site(8, 1, 8, 16), rotary_dim=4, interleaved=True), q, q, pos)
    close(got[0, 0], want, atol=1e-4)
    assert torch.equal(got[..., 4:], q[..., 4:])


def test_rope_golden_frequencies():
    for name, want in golden("rope")["inv_freq"].items():
        dim, base = (int(part[1:].removeprefix("ase")) for part in name.split("_"))
        got = frequencies.rope(base, dim)
        assert got.dtype == torch.float64
        torch.testing.assert_close(
            got, torch.tensor(want, dtype=torch.float64), rtol=2e-6, atol=0
        )  # the two usual float32 formulas differ by 5e-7 themselves


def test_rope_equals_x_transformers(oracle):
    q = torch.randn(B, H, T, D)
    pos = torch.arange(3, 3 + T)
    angles, scale = oracle.RotaryEmbedding(6)(pos)
    want = oracle.apply_rotary_pos_emb(q, angles, scale)
    got, _ = turn(Rope(SITE, rotary_dim=6, interleaved=True), q, q, pos)
    close(got, want.double(), atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 2, 6])
def test_rope_scores_equal_loops(interleaved, rotary_dim):
    scheme = Rope(SITE, base=100.0, rotary_dim=rotary_dim, interleaved=interleaved)
    width = rotary_dim or D
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(40, 40 + T)
    turned_q, turned_k = turn(scheme, q, k, pos)
    for t in range(T):
        for s in range(T):
            want = (q[:, :, t, width:] * k[:, :, s, width:]).double().sum(-1)
            for c in range(width // 2):
                a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + width // 2)
                angle = (s - t) * 100.0 ** (-2 * c / width)
                qa, qb, ka, kb = (x.double() for x in (q[:, :, t, a], q[:, :, t, b],
                                                       k[:, :, s, a], k[:, :, s, b]))  # fmt: skip
                want += math.cos(angle) * (qa * ka + qb * kb) + math.sin(angle) * (
                    qb * ka - qa * kb
                )
            got = (turned_q[:, :, t] * turned_k[:, :, s]).sum(-1)
            close(got, want, atol=5e-5)  # float32 angles near 44 are off by 2e-6, scores near 10


def test_rope_layouts_are_one_up_to_the_order_of_dimensions():
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(T)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # (2c, 2c+1) <- (c, c + 4)
    half, _ = turn(Rope(SITE), q, k, pos)
    interleaved, _ = turn(Rope(SITE, interleaved=True), q[..., order], k, pos)
    assert torch.equal(interleaved, half[..., order])
    assert not torch.allclose(turn(Rope(SITE, interleaved=True), q, k, pos)[0], half)


def test_rope_takes_positions_a_sequence():
    q = torch.randn(B, H, T, D)
    pos = torch.stack([torch.arange(T), torch.arange(7, 7 + T)])  # (B, T)
    got, _ = turn(Rope(SITE), q, q, pos)
    for b in range(B):
        assert torch.equal(got[b], turn(Rope(SITE), q, q, pos[b])[0][b])


@pytest.mark.parametrize("m", [64, 512, 4096, 32768])
def test_rope_rotations_compose(m):
    """R(m)^T R(n) = R(n - m), float32 matrices against a float64 one."""
    eye = torch.eye(D).expand(1, 1, D, D)

    def matrix(p):  # column c is R(p) e_c
        return turn(Rope(SITE), eye, eye, torch.full((D,), p))[0][0, 0].T

    n = m - 11
    got = matrix(m).T @ matrix(n)
    want = torch.zeros(D, D, dtype=torch.float64)
    for c, w in enumerate(1e4 ** (-2 * c / D) for c in range(D // 2)):
        cos, sin = math.cos((n - m) * w), math.sin((n - m) * w)
        want[c, c] = want[c + D // 2, c + D // 2] = cos
        want[c + D // 2, c], want[c, c + D // 2] = sin, -sin
    # two float32 angles, each rounded to 6e-8 of itself, from frequencies with 6e-8
    close(got, want, atol=1e-6 + 2.4e-7 * m)
    close(got @ got.T, torch.eye(D), atol=1e-6)


@pytest.mark.parametrize("length", [64, 512, 4096, 32768])
@pytest.mark.parametrize("where", ["float32", "bfloat16", "autocast"])
def test_rope_angles_are_float32_everywhere(length, where):
    """At most 2e-3 rad off at 32768, in proportion at shorter lengths; bfloat16 would be off by
    whole turns (positions above 256 are not exact)."""
    d_head = 64
    scheme = Rope(Site(d_head, 1, d_head, 16))
    q = torch.zeros(1, 1, 3, d_head)
    q[..., : d_head // 2] = 1  # turns into cos and sin of every angle
    pos = torch.tensor([length - 3, length - 2, length - 1])
    if where == "bfloat16":
        scheme = scheme.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        got, _ = turn(scheme, q, q, pos)
    assert got.dtype == torch.float32
    cos, sin = got[0, 0].double().chunk(2, -1)
    exact = pos.double()[:, None] * frequencies.rope(1e4, d_head)
    error = torch.atan2(
        sin * exact.cos() - cos * exact.sin(), cos * exact.cos() + sin * exact.sin()
    )
    assert error.abs().max() < 2e-3 * length / 32768 + 1e-6


def test_rope_in_half_precision_turns_in_full():
    q = torch.randn(B, H, T, D).bfloat16()
    pos = torch.arange(5000, 5000 + T)
    got, _ = turn(Rope(SITE).to(torch.bfloat16), q, q, pos)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, turn(Rope(SITE), q.float(), q.float(), pos)[0].bfloat16())


def test_rope_refuses_widths_that_cannot_turn():
    with pytest.raises(UserError, match=r"rotary_dim 5 cannot turn in pairs.*scheme.rotary_dim.*4"):
        Rope(SITE, rotary_dim=5)
    with pytest.raises(UserError, match=r"rotary_dim 7 .*d_head 7.*even"):
        Rope(Site(21, 3, 7, 16))
    with pytest.raises(UserError, match=r"rotary_dim 10 is wider.*d_head 8.*null"):
        Rope(SITE, rotary_dim=10)
    with pytest.raises(UserError, match="base is 1"):
        Rope(SITE, base=1)


# -- extensions of RoPE --------------------------------------------------------------------------


def rope_of(dim: int) -> Rope:
    """The trained scheme of the golden file: base 10000, training length 512."""
    return Rope(Site(dim, 1, dim, 512))


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("factor", [4, 16])
@pytest.mark.parametrize(
    ("name", "extend"),
    [("linear", pi), ("ntk_static", ntk), ("yarn", partial(yarn, ramp="pairs"))],
    ids=["linear", "ntk", "yarn"],
)
def test_static_extensions_golden(name, extend, dim, factor):
    want = golden("rope_scaling")[f"{name}_d{dim}_factor{factor}"]
    for scheme in (extend(rope_of(dim), 512 * factor), extend(rope_of(dim), 99, factor=factor)):
        close(scheme.inv_freq / torch.tensor(want["inv_freq"]), torch.ones(dim // 2), atol=2e-6)
        assert scheme.attention_factor == pytest.approx(want["attention_factor"], abs=1e-7)


def test_dynamic_golden():
    cases = [name for name in golden("rope_scaling") if name.startswith("dynamic")]
    assert len(cases) == 23
    for name in cases:
        _, dim, factor, n = name.split("_")
        dim, factor, n = int(dim[1:]), float(factor[6:]), int(n[3:])
        got = dynamic(rope_of(dim), 99, factor=factor).frequencies(n)
        want = torch.tensor(golden("rope_scaling")[name]["inv_freq"])
        close(got / want, torch.ones(dim // 2), atol=2e-6)


@pytest.mark.parametrize("extend", [pi, ntk, dynamic, yarn])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_extensions_change_a_copy_only(extend, interleaved):
    scheme = Rope(SITE, base=500.0, rotary_dim=6, interleaved=interleaved)
    before = copy.deepcopy(scheme)
    q, k = torch.randn(2, B, H, 40, D)
    pos = torch.arange(40)
    plain = turn(scheme, q, k, pos)
    longer = extend(scheme, 40)
    assert longer is not scheme
    assert (longer.base, longer.rotary_dim, longer.interleaved) == (500.0, 6, interleaved)
    assert not torch.allclose(turn(longer, q, k, pos)[0], plain[0], atol=1e-2)
    assert torch.equal(scheme.inv_freq, before.inv_freq)
    assert scheme.attention_factor == 1.0
    assert all(map(torch.equal, turn(scheme, q, k, pos), plain))


@pytest.mark.parametrize("extend", [pi, ntk, dynamic, yarn])
@pytest.mark.parametrize("length", [1, 10, 16])
def test_rope_extensions_do_nothing_within_the_training_length(extend, length):
    scheme = Rope(SITE)
    q, k = torch.randn(2, B, H, length, D)
    pos = torch.arange(length)
    assert all(map(torch.equal, turn(extend(scheme, length), q, k, pos), turn(scheme, q, k, pos)))
    one = extend(scheme, 999, factor=1.0)
    assert all(map(torch.equal, turn(one, q, k, pos), turn(scheme, q, k, pos)))


@pytest.mark.parametrize("extend", [pi, ntk, yarn])
def test_extensions_start_from_the_trained_base(extend):
    """Extending an extended scheme is extending the trained one: factors do not multiply."""
    once, twice = extend(Rope(SITE), 64), extend(yarn(Rope(SITE), 48), 64)
    assert torch.equal(once.inv_freq, twice.inv_freq)
    assert once.attention_factor == twice.attention_factor


@pytest.mark.parametrize("extend", [pi, ntk, dynamic, yarn])
def test_rope_extensions_keep_float32_angles(extend):
    longer = extend(Rope(SITE), 64)
    want = longer.frequencies(64)
    got = copy.deepcopy(longer).to(torch.bfloat16).frequencies(64)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("extend", [pi, ntk, dynamic, yarn])
def test_rope_extensions_refuse_to_squeeze(extend):
    with pytest.raises(
        UserError, match=rf"{extend.__name__}: factor is 0.5; it must be at least 1"
    ):
        extend(Rope(SITE), 64, factor=0.5)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    plain, got = frequencies.rope(1e4, 16), frequencies.ntk(1e4, 16, 4)
    assert got[0] == plain[0] == 1
    assert got[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-12)
    for extend in (ntk, dynamic):
        with pytest.raises(UserError, match=r"2 rotated dimensions are one pair.*pi"):
            extend(Rope(SITE, rotary_dim=2), 64)


def test_dynamic_follows_the_length_of_every_pass():
    scheme = dynamic(Rope(SITE), 999)
    slowest = [scheme.frequencies(n)[-1].item() for n in (1, 16, 17, 32, 64, 1000)]
    assert slowest[0] == slowest[1]
    assert all(a > b for a, b in itertools.pairwise(slowest[1:]))
    q = torch.randn(B, H, 64, D)
    long = turn(scheme, q, q, torch.arange(64))[0]
    short = turn(scheme, q[:, :, :16], q[:, :, :16], torch.arange(16))[0]
    assert not torch.allclose(long[:, :, :16], short, atol=1e-2)  # a prefix changes
    # a short pass after a long one is the trained scheme again
    assert torch.equal(short, turn(Rope(SITE), q[:, :, :16], q[:, :, :16], torch.arange(16))[0])
    assert torch.equal(long, turn(ntk(Rope(SITE), 64), q, q, torch.arange(64))[0])  # factor n / L


def test_length_following_schemes_are_not_extended_again():
    scheme = dynamic(Rope(SITE), 64)
    for extend in (pi, ntk, yarn):
        with pytest.raises(UserError, match="DynamicRope follow the length"):
            extend(scheme, 64)
    with pytest.raises(UserError, match="dynamic: the scheme is DynamicRope"):
        dynamic(scheme, 64)


def test_yarn_sharpens_scores_by_its_factor_squared():
    scheme = yarn(Rope(SITE), 64)
    temperature = 0.1 * math.log(4) + 1
    q, k = torch.randn(2, B, H, T, D)
    same = torch.full((T,), 9)  # equal positions: rotations cancel
    turned_q, turned_k = turn(scheme, q, k, same)
    close((turned_q * turned_k).sum(-1), (q * k).double().sum(-1) * temperature**2, atol=1e-5)


def test_yarn_ramp_by_turns():
    """Pairs above beta_fast turns stay, pairs below beta_slow are divided by s, others blend."""
    train_len, dim, factor = 4096, 64, 8.0
    plain = frequencies.rope(1e4, dim)
    turns = train_len * plain / (2 * math.pi)
    got = frequencies.yarn(1e4, dim, factor, train_len, 32, 1, "turns")
    torch.testing.assert_close(got[turns > 32], plain[turns > 32])
    torch.testing.assert_close(got[turns < 1], plain[turns < 1] / factor)
    between = (turns < 32) & (turns > 1)
    assert between.sum() > 5
    kept = (got * factor / plain - 1)[between] / (factor - 1)  # g
    torch.testing.assert_close(kept, (turns[between] - 1) / 31)


def test_yarn_scaled_ramp_at_a_short_training_length():
    """At 64 tokens pairs 0, 1, 2 of 8 make 10.2, 3.2 and 1.02 turns; 4 and 1 are the ends."""
    scheme = Rope(Site(64, 4, 16, 64))
    config = OmegaConf.load(config_dir() / "extension" / "yarn_scaled.yaml")
    scaled, published = instantiate(config, scheme, 256), yarn(scheme, 256)
    want = [1, (3.2211 - 1) / 3, (1.0186 - 1) / 3, 0, 0, 0, 0, 0]
    for got, share in (
        (scaled, want),
        (published, [9.186 / 31, 2.2211 / 31, 0.0186 / 31, *[0] * 5]),
    ):
        close(got.inv_freq / scheme.inv_freq, [g + (1 - g) / 4 for g in share], atol=1e-4)


def test_yarn_ramp_in_pairs_keeps_the_fastest_pair_at_a_short_training_length():
    scheme = Rope(Site(64, 4, 16, 64))
    theta = yarn(scheme, 256, ramp="pairs").inv_freq
    assert theta[0] == scheme.inv_freq[0]
    with pytest.raises(UserError, match="ramp 'steps' is not known: use turns or pairs"):
        yarn(scheme, 256, ramp="steps")


def test_yarn_refuses_ends_in_the_wrong_order():
    tiny = yarn(Rope(Site(64, 4, 16, 8)), 32, beta_fast=None)  # train_len / 16 is below beta_slow
    assert tiny.inv_freq.isfinite().all()
    with pytest.raises(UserError, match=r"beta_fast 0.5 and beta_slow 1.0.*turns"):
        yarn(Rope(SITE), 256, beta_fast=0.5)


def test_extensions_say_what_they_apply_to():
    for name, function in EXTENSIONS.items():
        first = next(iter(inspect.signature(function).parameters.values()))
        assert issubclass(first.annotation, Scheme)
        assert first.annotation is (Learned if name in ("interpolate", "clip") else Rope)
