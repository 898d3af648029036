"""Score biases against formulas and published code."""

import copy
import math

import pytest
import torch
from oracles import SITE, B, D, E, H, S, T, close, golden

from posx.errors import UserError
from posx.schemes.base import Site
from posx.schemes.bias import T5, Alibi, alibi_slopes, bucket_starts


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
