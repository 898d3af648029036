"""Variants of RoPE, against golden values, x-transformers and loops written from the formulas."""

import math

import pytest
import torch
from oracles import NO_X, SITE, B, D, H, T, close, golden
from test_rotary import turn

from posx import catalog
from posx.attention import attend, block
from posx.build import load_yaml, make_extension
from posx.errors import UserError
from posx.schemes.base import Site
from posx.schemes.rotary import Rope
from posx.schemes.rotary_variants import (
    ClippedRope,
    Fope,
    Hope,
    LearnedRope,
    Pope,
    PRope,
    ResonanceRope,
    Xpos,
)  # fmt: skip

LONG = Site(64, 2, 32, 64)  # a head as in the default model
OWN_RULE = ["rope_learned", "xpos", "fope", "pope"]


def scores_of(scheme, q, k, pos):
    """q k^T of turned queries and keys. (B, H, T, T)"""
    q, k = turn(scheme, q, k, pos)
    return q @ k.transpose(-1, -2)


def test_p_rope_golden():
    for name, want in golden("rope")["p_rope_proportional"].items():
        close(PRope(Site(16, 1, 16, 64), p=float(name[5:])).inv_freq, want, atol=1e-7)


def test_p_rope_ends_are_rope_and_no_position():
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(30, 30 + T)
    assert all(map(torch.equal, turn(PRope(SITE, p=1), q, k, pos), turn(Rope(SITE), q, k, pos)))
    assert all(map(torch.equal, turn(PRope(SITE, p=0), q, k, pos), (q, k)))
    with pytest.raises(UserError, match=r"p_rope: p is 1.5; it must be a share from 0 to 1"):
        PRope(SITE, p=1.5)


@pytest.mark.parametrize("train_len", [16, 64, 63, 2048])
def test_hope_turns_what_makes_a_full_turn_in_training(train_len):
    got = Hope(Site(64, 2, 32, train_len)).inv_freq
    for c in range(16):
        theta = 1e4 ** (-2 * c / 32)
        turns = train_len * theta / (2 * math.pi)
        assert got[c].item() == pytest.approx(theta if turns >= 1 else 0, rel=1e-6)
    assert 0 < (got > 0).sum() < 16


def test_rope_clip_at_the_size_of_the_published_code():
    """20 of 64 pairs, from the first with factor 1 to the last with factor 0."""
    site = Site(128, 1, 128, 8192)
    soft, hard = ClippedRope(site, base=5e5), ClippedRope(site, base=5e5, soft=False)
    for c in range(64):
        theta, step = 5e5 ** (-2 * c / 128), c - 44
        factor = 0.5 * (1 + math.cos(math.pi * step / 19)) if step >= 0 else 1
        assert soft.inv_freq[c].item() == pytest.approx(theta * factor, rel=1e-6, abs=1e-12)
        assert hard.inv_freq[c].item() == pytest.approx(theta if step < 0 else 0, rel=1e-6)
    with pytest.raises(UserError, match=r"rope_clip: share is -0.1; .*20 of 64"):
        ClippedRope(site, share=-0.1)


def test_resonance_repeats_after_a_whole_wavelength():
    scheme = ResonanceRope(LONG)
    for c in range(16):
        wave = round(2 * math.pi * 1e4 ** (2 * c / 32))
        assert scheme.inv_freq[c].item() == pytest.approx(2 * math.pi / wave, rel=1e-6)
    q = torch.randn(1, 2, 1, 32)
    for c, wave in ((0, 6), (1, 11), (2, 20)):  # 6.28, 11.17, 19.87 tokens in RoPE
        first, later = (turn(scheme, q, q, torch.tensor([p]))[0] for p in (4, 4 + 7 * wave))
        pair = [c, c + 16]
        close(later[..., pair], first[..., pair].double(), atol=5e-5)  # float32 angles to 90
        assert not torch.allclose(later, first, atol=1e-2)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_learned_equals_loops(per_head, interleaved):
    scheme = LearnedRope(SITE, base=100.0, per_head=per_head, interleaved=interleaved)
    assert scheme.weight.shape == ((H if per_head else 1), D // 2)
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(9, 9 + T)
    plain = turn(Rope(SITE, 100.0, interleaved=interleaved), q, k, pos)
    for got, want in zip(turn(scheme, q, k, pos), plain, strict=True):
        close(got, want.double(), atol=1e-6)  # starts as RoPE
    torch.nn.init.normal_(scheme.weight)
    got = scores_of(scheme, q, k, pos)
    for h in range(H):
        w = scheme.weight[h if per_head else 0].tolist()
        for t in range(T):
            for s in range(T):
                want = torch.zeros(B, dtype=torch.float64)
                for c in range(D // 2):
                    a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + D // 2)
                    angle = (s - t) * 100.0 ** (-2 * c / D) * math.exp(w[c])
                    qa, qb = q[:, h, t, a].double(), q[:, h, t, b].double()
                    ka, kb = k[:, h, s, a].double(), k[:, h, s, b].double()
                    want += math.cos(angle) * (qa * ka + qb * kb)
                    want += math.sin(angle) * (qb * ka - qa * kb)
                close(got[:, h, t, s], want, atol=5e-5)  # float32 angles to 100, scores near 10


@pytest.mark.parametrize(
    "scheme", [LearnedRope(SITE), LearnedRope(SITE, per_head=True), Xpos(SITE), Fope(SITE),
               Pope(SITE, uniform=True)],
    ids=["learned", "learned_per_head", "xpos", "fope", "pope"],
)  # fmt: skip
def test_variants_take_positions_a_sequence(scheme):
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.stack([torch.arange(T), torch.arange(7, 7 + T)])  # (B, T)
    both = turn(scheme, q, k, pos)
    for b in range(B):
        for got, want in zip(both, turn(scheme, q, k, pos[b]), strict=True):
            torch.testing.assert_close(got[b], want[b])


def test_xpos_golden():
    values = golden("xpos")
    scheme = Xpos(Site(8, 1, 8, 16), scale_base=values["scale_base"], gamma=values["gamma"])
    close((scheme.decay * 512).exp(), values["zeta"], atol=1e-7)
    pos = torch.arange(12)
    q, k = (torch.tensor(values[name]).expand(1, 1, 12, 8) for name in "qk")
    close(scores_of(scheme, q, k, pos)[0, 0], values["scores_q_row_k_col_T12"], atol=1e-6)


def test_xpos_equals_x_transformers(oracle):
    scheme = Xpos(SITE, scale_base=20.0)
    q, k = torch.randn(2, B, H, 30, D)
    pos = torch.arange(30)
    angles, scale = oracle.RotaryEmbedding(D, use_xpos=True, scale_base=20)(pos)
    want_q = oracle.apply_rotary_pos_emb(q, angles, scale)
    want_k = oracle.apply_rotary_pos_emb(k, angles, scale**-1)
    want = want_q @ want_k.transpose(-1, -2)  # centred on token 15: scores are the same
    past = torch.ones(30, 30).tril().bool()  # beyond it scores grow to 100
    close(scores_of(scheme, q, k, pos)[..., past], want[..., past].double(), atol=1e-5)


def test_xpos_computes_up_to_its_longest_length():
    scheme = Xpos(LONG)
    assert scheme.max_len == 32695 == int(80 * 512 / math.log(3.5))
    q, k = torch.randn(2, 1, 2, 3, 32)
    pos = torch.tensor([0, 17, 32694])
    got = scores_of(scheme, q, k, pos)
    assert got.isfinite().all()  # keys after their query included, which a mask only hides
    near = scores_of(scheme, q, k, torch.tensor([0, 0, 0])).diagonal(dim1=-2, dim2=-1)
    close(got.diagonal(dim1=-2, dim2=-1), near.double(), atol=1e-4)  # sizes cancel: e^80 e^-80
    with pytest.raises(UserError, match=r"xpos: scale_base 0 and gamma 0.4; both must be above 0"):
        Xpos(LONG, scale_base=0)


@pytest.mark.parametrize(
    ("base", "padded_sin", "count", "out"), [(1e4, 1.0, 5, 5), (100.0, 1.0, 9, 8), (1e4, 0.0, 5, 5)]
)
def test_fope_equals_loops(base, padded_sin, count, out):
    """At train_len 64 `count` pairs of RoPE make a full turn, and `out` pairs are fed by them."""
    scheme = Fope(LONG, base=base, padded_sin=padded_sin)
    theta = [base ** (-2 * c / 32) for c in range(16)]
    theta = [each for each in theta if each >= 2 * math.pi / 64]
    assert len(theta) == count
    assert scheme.cos_mix.shape == scheme.sin_mix.shape == (2, count, out)
    q, k = torch.randn(2, B, 2, T, 32)
    pos = torch.tensor([0, 1, 5, 40, 200])
    turned, _ = turn(scheme, q, k, pos)
    for t, p in enumerate(pos.tolist()):
        for h in range(2):
            for c in range(16):
                cos, sin = 1.0, padded_sin
                if c < out:
                    cos, sin = (
                        sum(f(p * each) * mix[h, row, c].item() for row, each in enumerate(theta))
                        for f, mix in ((math.cos, scheme.cos_mix), (math.sin, scheme.sin_mix))
                    )
                a, b = q[:, h, t, c].double(), q[:, h, t, c + 16].double()
                # float32 angles up to 200 are off by 1e-5, and mixed
                close(turned[:, h, t, c], a * cos - b * sin, atol=1e-4)
                close(turned[:, h, t, c + 16], a * sin + b * cos, atol=1e-4)


def test_fope_mixes_are_frozen_and_saved():
    scheme = Fope(Site(512, 8, 64, 512), init_gain=0.3)
    assert not list(scheme.parameters())
    assert set(scheme.state_dict()) == {"cos_mix", "sin_mix"}
    assert not torch.equal(scheme.cos_mix, scheme.sin_mix)
    count, out = scheme.cos_mix.shape[1:]  # 16 of 16 or fewer pairs, each fed by all of them
    assert (count, out) == (len(scheme.inv_freq), 16)
    step = math.ceil(count / out)
    for c in range(out):
        noise = scheme.cos_mix[:, :, c].clone()
        if c * step < count:
            noise[:, c * step] -= 1
        assert noise.abs().max() < 0.3  # Xavier noise; the identity is gone
    for train_len, d_head in ((6, 8), (64, 2)):
        with pytest.raises(UserError, match="fope: no frequency makes a full turn"):
            Fope(Site(24, 3, d_head, train_len))


def test_fope_without_noise_feeds_pairs_with_every_other_frequency():
    """Nine frequencies over eight pairs: steps of two, so three pairs are fed by none."""
    scheme = Fope(LONG, base=100.0, init_gain=0.0)
    want = torch.zeros(9, 8)
    want[[0, 2, 4, 6, 8], [0, 1, 2, 3, 4]] = 1
    for mix in (scheme.cos_mix, scheme.sin_mix):
        assert all(torch.equal(each, want) for each in mix)


def test_fope_with_as_many_frequencies_as_pairs_is_the_identity_without_noise():
    """At train_len 16 and d_head 8 one frequency feeds one pair: RoPE's first."""
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(3, 3 + T)
    fope, rope = (
        turn(scheme, q, k, pos)[0]
        for scheme in (Fope(SITE, init_gain=0.0, padded_sin=0.0), PRope(SITE, p=0.25))
    )
    close(fope, rope.double(), atol=1e-6)


def test_pope_golden():
    values = golden("pope")
    q = torch.tensor(values["q (T,H,d)"]).transpose(0, 1)[None]  # (1, H, T, D)
    heads, n, width = q.shape[1:]
    scheme = Pope(Site(heads * width, heads, width, 16))
    close(scheme.inv_freq, values["inv_freq"], atol=1e-7)
    got, _ = turn(scheme, q, q, torch.arange(n))
    close(got[0], values["q_embedded (H,T,2d)"], atol=1e-6)


def test_pope_equals_x_transformers(oracle):
    scheme = Pope(SITE)
    polar = oracle.PolarEmbedding(D, H)
    torch.nn.init.normal_(polar.learned_bias, -2.0, 4.0)  # on both sides of the clamp
    with torch.no_grad():
        scheme.delta.copy_(polar.learned_bias[:, 0])
    q, k = torch.randn(2, B, H, T, D)
    pos = torch.arange(T)
    freqs, bias = polar(pos)
    got_q, got_k = turn(scheme, q, k, pos)
    close(got_q, oracle.apply_polar_pos_emb(q, freqs).double(), atol=1e-6)
    close(got_k, oracle.apply_polar_pos_emb(k, freqs + bias).double(), atol=1e-6)


def test_pope_scores_equal_loops():
    """Divided by sqrt(d_head), not by the root of the doubled width, on every path."""
    scheme = Pope(SITE, base=100.0, uniform=True)
    assert scheme.delta.shape == (H, D)
    assert -2 * math.pi <= scheme.delta.min() < -3 < scheme.delta.max() <= 0
    q, k, v = torch.randn(3, B, H, T, D)
    pos = torch.arange(20, 20 + T)
    turned = scheme.prepare(NO_X, q, k, v, pos, None)[:3]
    weights = block(scheme, *turned, pos, pos, None)[1]
    for h in range(H):
        for t in range(T):
            z = torch.zeros(B, t + 1, dtype=torch.float64)
            for s in range(t + 1):
                for c in range(D):
                    size = (q[:, h, t, c].double().exp() + 1).log()
                    size = size * (k[:, h, s, c].double().exp() + 1).log()
                    angle = (t - s) * 100 ** (-c / D) - scheme.delta[h, c].item()
                    z[:, s] += size * math.cos(angle) / D**0.5
            close(weights[:, h, t, : t + 1], z.softmax(-1), atol=1e-5)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            got = attend(scheme, *turned, pos, pos, None)
        close(got, (weights @ v).detach().double(), atol=1e-6)


def test_pope_phases_start_at_zero():
    assert (Pope(SITE).delta == 0).all()


def test_variants_with_a_rule_of_their_own_are_not_extended():
    for name in OWN_RULE:
        node = load_yaml(catalog.find("scheme", name))
        for extension in ("pi", "ntk", "yarn", "dynamic", "longrope", "rope_clip", "drope0"):
            assert not make_extension(load_yaml(catalog.find("extension", extension))).fits(node)
    with pytest.raises(UserError, match=r"pi changes Rope, not pope: it applies to .*p_rope"):
        make_extension(load_yaml(catalog.find("extension", "pi"))).check(node)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PRope, "p_rope"), (Hope, "hope"), (ClippedRope, "rope_clip"), (Xpos, "xpos"),
        (LearnedRope, "rope_learned"), (Fope, "fope"),
    ],
)  # fmt: skip
def test_variants_refuse_heads_without_pairs_and_bases(kind, name):
    with pytest.raises(UserError, match=rf"{name}: d_head 7 is odd.*even head width"):
        kind(Site(21, 3, 7, 64))
    with pytest.raises(UserError, match=rf"{name}: base is 1; it must be above 1"):
        kind(SITE, base=1)


def test_pope_turns_odd_heads_and_refuses_bases():
    assert Pope(Site(21, 3, 7, 64)).inv_freq.shape == (7,)
    with pytest.raises(UserError, match="pope: base is 1; it must be above 1"):
        Pope(SITE, base=1)


@pytest.mark.parametrize(
    "kind", [PRope, Hope, ClippedRope, ResonanceRope, LearnedRope, Xpos, Fope, Pope]
)
@pytest.mark.parametrize("where", ["bfloat16", "autocast"])
def test_angles_are_float32_everywhere(kind, where):
    """Within 8 bits of the full precision at position 5000, where bfloat16 has no such number."""
    torch.manual_seed(0)
    scheme = kind(LONG)
    q, k = torch.randn(2, B, 2, T, 32).bfloat16()
    pos = torch.arange(5000, 5000 + T)
    want = turn(scheme, q.float(), k.float(), pos)
    if where == "bfloat16":
        # what is trained or drawn is rounded with the weights, what is fixed is not
        weights = {name: x.bfloat16().float() for name, x in scheme.state_dict().items()}
        scheme.load_state_dict(weights)
        want = turn(scheme, q.float(), k.float(), pos)
        scheme = scheme.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        got = turn(scheme, q, k, pos)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g, w.bfloat16(), atol=2**-7, rtol=2**-7)
