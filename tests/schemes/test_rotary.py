"""Rotary positions and the extensions of a trained RoPE, against formulas and published code."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from oracles import NO_X, SITE, B, D, H, T, close, golden

from posx import catalog
from posx.build import load_yaml, make_extension
from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Site
from posx.schemes.rotary import Rope, dynamic, ntk, pi, yarn


def turn(scheme: Rope, q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor):
    """q and k after the scheme. (B, H, T, D)"""
    q, k, v, state = scheme.prepare(NO_X, q, k, NO_X, pos, None)
    assert v is NO_X
    assert state is None
    return q, k


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
    extension = make_extension(load_yaml(catalog.find("extension", "yarn_scaled")))
    scaled, published = extension(scheme, 256), yarn(scheme, 256)
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
