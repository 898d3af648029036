"""Absolute positions against formulas and published code."""

import math

import pytest
import torch
from oracles import SITE, B, E, T, close, golden

from posx import conformance
from posx.errors import UserError
from posx.schemes.absolute import Learned, Sinusoidal, clip, interpolate, sinusoids, wrap
from posx.schemes.base import Site


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


@pytest.mark.parametrize("d_model", [7, 8])
@pytest.mark.parametrize(
    ("spread", "key"),
    [
        ("vaswani", "concat_half_vaswani_freqs_d{}_n6__marian"),
        ("t2t", "concat_half_t2t_freqs_d{}_n6__fsmt"),
    ],
)
def test_sinusoidal_variants_golden(d_model, spread, key):
    want = torch.tensor(golden("sinusoidal")[key.format(d_model)])  # (6, E)
    scheme = Sinusoidal(Site(d_model, 1, d_model, 6), layout="half", spread=spread)
    got = scheme.embed(torch.zeros(B, 6, d_model), torch.arange(6))
    close(got, want.expand(B, 6, d_model), atol=3e-7)  # float32 angles up to 5 in their code


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("d_model", [1, 2, 3, 7, 10])
def test_sinusoidal_t2t_formula(d_model, layout, sign):
    """w_c = base^(sign c / (n - 1)) for n = d_model // 2 pairs, and no column for the odd one."""
    pos, n = [0, 1, 100, 8191], d_model // 2
    got = sinusoids(torch.tensor(pos), d_model, 50.0, sign, layout, "t2t")
    for row, p in enumerate(pos):
        want = [0.0] * d_model
        for c in range(n):
            angle = p * 50.0 ** (sign * c / max(n - 1, 1))
            sine, cosine = (2 * c, 2 * c + 1) if layout == "interleaved" else (c, n + c)
            want[sine], want[cosine] = math.sin(angle), math.cos(angle)
        close(got[row], want, atol=1e-9)  # angles reach 4e5, where float64 keeps 6e-11


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
    for options in ({"base": 50.0}, {"exponent_sign": 1}, {"layout": "half"}, {"spread": "t2t"}):
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
    with pytest.raises(UserError, match=r"layout 'halves' is not known: use interleaved or half"):
        Sinusoidal(SITE, layout="halves")
    with pytest.raises(UserError, match=r"spread 'even' is not known: use vaswani or t2t"):
        Sinusoidal(SITE, spread="even")


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
    for part in (
        "length 8",
        "max_len 7",
        "--extend interpolate",
        "clip",
        "wrap",
        "scheme.max_len=8",
    ):
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


def test_wrap_starts_the_table_again():
    scheme = Learned(SITE, max_len=5)
    longer = wrap(scheme, 13)
    assert longer.max_len == 13
    for p in range(13):
        assert torch.equal(longer.table[p], scheme.table[p % 5])


def test_wrapped_table_is_a_sound_scheme():
    def wrapped(site: Site) -> Learned:
        return wrap(Learned(site), 4 * site.train_len)

    results = conformance.run(conformance.Subject("wrap", wrapped, "Wrap: of a test"))
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("extend", [interpolate, clip, wrap])
def test_table_extensions_use_the_rows_that_training_reached(extend):
    """The last token of a sequence is no input, so the last row of the table may be as drawn."""
    scheme = Learned(Site(d_model=E, n_heads=3, d_head=8, train_len=16, seen=11))
    longer = extend(scheme, 40)
    with torch.no_grad():
        scheme.table[11:] = 1e6
    assert torch.equal(longer.table, extend(scheme, 40).table)


@pytest.mark.parametrize("extend", [interpolate, clip, wrap])
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
