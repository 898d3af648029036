"""Rotary positions against formulas and published code."""

import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, H, T, close, golden

from posx import catalog
from posx.build import load_yaml, make_scheme
from posx.errors import UserError
from posx.schemes import frequencies
from posx.schemes.base import Scheme, Site
from posx.schemes.rotary import Rope


def turn(scheme: Scheme, q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor):
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


def test_variants_of_the_catalogue_are_rope_with_other_keys():
    def built(name, site):
        return make_scheme(load_yaml(catalog.find("scheme", name)), site)

    site = Site(64, 2, 32, 64)
    partial, abf = built("rope_partial", site), built("rope_abf", site)
    assert partial.rotary_dim == site.d_head / 4
    q, k = torch.randn(2, B, 2, T, 32)
    got, _ = turn(partial, q, k, torch.arange(T))
    want, _ = turn(Rope(Site(16, 2, 8, 64)), q[..., :8], k[..., :8], torch.arange(T))
    assert torch.equal(got, torch.cat([want, q[..., 8:]], -1))
    want = golden("rope")["inv_freq"]["d16_base500000"]
    close(built("rope_abf", Site(32, 2, 16, 64)).inv_freq, want, atol=1e-7)
    assert abf.rotary_dim == 32
