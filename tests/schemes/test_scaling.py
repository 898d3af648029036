"""Extensions of a trained RoPE, against formulas and published code."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from oracles import NO_X, SITE, B, D, H, T, close, golden
from test_rotary import turn

from posx import catalog, conformance
from posx.attention import block
from posx.build import load_yaml, make_extension, make_scheme
from posx.conformance import MODEL, VOCAB, Subject
from posx.errors import UserError
from posx.model import Transformer
from posx.schemes import frequencies
from posx.schemes.base import Nope, Site
from posx.schemes.rotary import Rope
from posx.schemes.rotary_variants import ClippedRope, Hope, PRope, ResonanceRope
from posx.schemes.scaling import (
    DynamicRope,
    drope0,
    dynamic,
    longrope,
    ntk,
    ntk_parts,
    pi,
    rope_clip,
    yarn,
)  # fmt: skip

STRETCHING = [pi, ntk, dynamic, ntk_parts, yarn, longrope]


def rope_of(dim: int) -> Rope:
    """The trained scheme of the golden file: base 10000, training length 512."""
    return Rope(Site(dim, 1, dim, 512))


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("factor", [4, 16])
@pytest.mark.parametrize(
    ("name", "extend"),
    [
        ("linear", pi),
        ("ntk_static", ntk),
        ("yarn", partial(yarn, ramp="pairs")),
        ("llama3", partial(ntk_parts, beta_fast=4, beta_slow=1, ramp="turns")),
    ],
    ids=["linear", "ntk", "yarn", "llama3"],
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


@pytest.mark.parametrize("extend", STRETCHING)
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


@pytest.mark.parametrize("extend", STRETCHING)
@pytest.mark.parametrize("length", [1, 10, 16])
def test_rope_extensions_do_nothing_within_the_training_length(extend, length):
    scheme = Rope(SITE)
    q, k = torch.randn(2, B, H, length, D)
    pos = torch.arange(length)
    assert all(map(torch.equal, turn(extend(scheme, length), q, k, pos), turn(scheme, q, k, pos)))
    one = extend(scheme, 999, factor=1.0)
    assert all(map(torch.equal, turn(one, q, k, pos), turn(scheme, q, k, pos)))


@pytest.mark.parametrize("extend", [pi, ntk, ntk_parts, yarn, longrope, rope_clip])
def test_extensions_start_from_the_trained_base(extend):
    """Extending an extended scheme is extending the trained one: factors do not multiply."""
    once, twice = extend(Rope(SITE), 64), extend(yarn(Rope(SITE), 48), 64)
    assert torch.equal(once.inv_freq, twice.inv_freq)
    assert once.attention_factor == twice.attention_factor


@pytest.mark.parametrize("extend", STRETCHING)
def test_rope_extensions_keep_float32_angles(extend):
    longer = extend(Rope(SITE), 64)
    want = longer.frequencies(64)
    got = copy.deepcopy(longer).to(torch.bfloat16).frequencies(64)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("extend", STRETCHING)
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
    for extend in (pi, ntk, dynamic, ntk_parts, yarn, longrope, rope_clip):
        with pytest.raises(UserError, match="cannot set the frequencies of DynamicRope"):
            extend(scheme, 64)


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


def test_llama3_golden_at_its_own_size():
    """The released Llama 3.1: base 500000, 128 dimensions, factor 8 from 8192 tokens."""
    want = golden("rope_scaling")["llama31_official_d128_base500000_factor8_orig8192"]
    extension = make_extension(load_yaml(catalog.find("extension", "llama3")))
    got = extension(Rope(Site(128, 1, 128, 8192), base=500000.0), 8 * 8192)
    close(got.inv_freq / torch.tensor(want["inv_freq"]), torch.ones(64), atol=2e-6)
    assert got.attention_factor == want["attention_factor"] == 1


def test_ntk_parts_is_yarn_without_its_temperature():
    for keys in ({}, {"beta_fast": None}, {"ramp": "pairs"}):
        parts, whole = (each(Rope(SITE), 64, **keys) for each in (ntk_parts, yarn))
        assert torch.equal(parts.inv_freq, whole.inv_freq)
        assert (parts.attention_factor, whole.attention_factor) == (1, 0.1 * math.log(4) + 1)
    with pytest.raises(UserError, match=r"ntk_parts: beta_fast 0.5 and beta_slow 1.0"):
        ntk_parts(Rope(SITE), 64, beta_fast=0.5)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("factor", [4, 16])
def test_longrope_golden(dim, factor):
    values = golden("rope_scaling")
    want = values[f"longrope_d{dim}_factor{factor}_seq513"]
    factors = values[f"longrope_d{dim}_factor{factor}_long_factor_used"]
    got = longrope(rope_of(dim), 513, factor=factor, factors=factors)
    close(got.inv_freq / torch.tensor(want["inv_freq"]), torch.ones(dim // 2), atol=2e-6)
    assert got.attention_factor == pytest.approx(want["attention_factor"], abs=1e-6)


def test_longrope_without_a_list_has_the_factors_of_ntk():
    scheme = rope_of(16)
    got = longrope(scheme, 2048)
    c = torch.arange(8)
    close(scheme.inv_freq / got.inv_freq, 4.0 ** (2 * c / 14), atol=2e-6)
    assert got.attention_factor == pytest.approx((1 + math.log(4) / math.log(512)) ** 0.5)
    within = longrope(yarn(scheme, 2048), 512, factor=4, factors=[2.0] * 8)
    assert torch.equal(within.inv_freq, scheme.inv_freq)
    assert within.attention_factor == 1
    for wrong in ([2.0] * 7, [0.5] * 8):
        with pytest.raises(UserError, match=r"longrope: factors are .* must be 8.*at least 1"):
            longrope(scheme, 2048, factors=wrong)


@pytest.mark.parametrize("soft", [True, False])
def test_rope_clip_equals_the_scheme_at_every_length(soft):
    trained = Rope(Site(64, 2, 32, 64), interleaved=True)
    want = ClippedRope(trained.site, share=0.5, soft=soft, interleaved=True)
    for length in (16, 640):
        got = rope_clip(trained, length, share=0.5, soft=soft)
        assert torch.equal(got.inv_freq, want.inv_freq)
        assert not torch.equal(got.inv_freq, trained.inv_freq)
    with pytest.raises(UserError, match=r"rope_clip: share is 2; .*from 0 to 1"):
        rope_clip(trained, 64, share=2)


def test_drope0_leaves_the_trained_model_without_positions():
    trained, plain = (Transformer(MODEL, VOCAB, kind, 16) for kind in (Rope, Nope))
    plain.load_state_dict(trained.state_dict())
    digits = VOCAB.split(torch.arange(12).view(1, 12) % VOCAB.size)
    with torch.no_grad():
        turned = trained(digits)
        trained.replace_schemes(lambda scheme: drope0(scheme, 64))
        assert torch.equal(trained(digits), plain(digits))
        assert not torch.allclose(turned, plain(digits), atol=1e-3)


def test_drope0_scales_scores():
    q, k, v = torch.randn(3, B, H, T, D)
    scheme, pos = drope0(Rope(SITE), 64, scale=1.5), torch.arange(T)
    got = block(scheme, *scheme.prepare(NO_X, q, k, v, pos, None)[:3], pos, pos, None)[1]
    z = 1.5 * (q @ k.transpose(-1, -2)).double() / D**0.5
    hidden = torch.ones(T, T).triu(1).bool()
    close(got, z.masked_fill(hidden, -torch.inf).softmax(-1), atol=1e-6)
    with pytest.raises(UserError, match=r"drope0: scale is 0; it must be above 0"):
        drope0(Rope(SITE), 64, scale=0)


# -- extensions of variants ----------------------------------------------------------------------

LONG = Site(64, 2, 32, 64)


@pytest.mark.parametrize("extend", STRETCHING)
def test_p_rope_keeps_its_still_pairs_under_an_extension(extend):
    got = extend(PRope(LONG, p=0.5), 256)
    want = extend(Rope(LONG), 256)
    for n in (64, 256):
        assert torch.equal(got.frequencies(n)[:8], want.frequencies(n)[:8])
        assert (got.frequencies(n)[8:] == 0).all()
    assert got.attention_factor == want.attention_factor


@pytest.mark.parametrize("extend", STRETCHING)
def test_hope_keeps_the_pairs_that_turned_in_training(extend):
    """Stretched ones make no full turn in train_len tokens and turn all the same."""
    turned = Hope(LONG).inv_freq > 0
    got, want = extend(Hope(LONG), 256).frequencies(256), extend(Rope(LONG), 256).frequencies(256)
    assert torch.equal(got, want * turned)


def test_yarn_on_resonance_rounds_what_yarn_made():
    """Resonance YaRN of Wang et al. 2024: wavelengths are rounded last."""
    got = yarn(ResonanceRope(LONG), 256)
    waves = 2 * math.pi / yarn(Rope(LONG), 256)._exact["inv_freq"]
    close(2 * math.pi / got._exact["inv_freq"], waves.round(), atol=1e-9)
    assert (waves - waves.round()).abs().max() > 0.1
    assert got.attention_factor == 0.1 * math.log(4) + 1


def test_dynamic_of_a_variant_is_that_variant_within_the_training_length():
    for kind in (PRope, Hope, ClippedRope, ResonanceRope):
        trained = kind(LONG)
        longer = dynamic(trained, 256)
        assert type(longer) is DynamicRope
        assert torch.equal(longer.frequencies(64), trained.inv_freq)
        assert not torch.equal(longer.frequencies(256), trained.inv_freq)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("pi", "p_rope"), ("ntk", "rope_clip"), ("dynamic", "resonance"), ("ntk_parts", "hope"),
        ("yarn", "resonance"), ("llama3", "rope"), ("longrope", "rope"), ("rope_clip", "rope"),
        ("drope0", "rope_abf"),
    ],
)  # fmt: skip
def test_extended_schemes_pass_all_checks(name, scheme):
    extension = make_extension(load_yaml(catalog.find("extension", name)))
    node = load_yaml(catalog.find("scheme", scheme))

    def make(site):
        return extension(make_scheme(node, site), 4 * site.train_len)

    results = conformance.run(Subject(name, make, "a card"))
    assert [result for result in results if not result.passed] == []
