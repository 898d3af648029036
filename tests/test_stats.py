"""Statistics against published values and hand computation."""

import math

import numpy as np
import pytest

from posx import stats


def row(length, acc, *, computes=True, verdict="degrades", chance=0.0):
    return {
        "length": length,
        "token_acc": acc,
        "skill": stats.skill(acc, chance),
        "computes": computes,
        "verdict": verdict if computes else "cannot",
    }


def curve(accs, *, verdicts=None):
    verdicts = verdicts or {}
    return [row(at, acc, verdict=verdicts.get(at, "degrades")) for at, acc in accs.items()]


# -- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "lo", "hi"),
    [
        (8, 10, 0.490, 0.943),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (64, 64, 0.943, 1.0),
    ],
)
def test_wilson_gives_published_intervals(successes, n, lo, hi):
    digits = 5e-4 if lo in (0.490, 0.943) else 5e-5
    assert stats.wilson(successes, n) == pytest.approx((lo, hi), abs=digits)


def test_wilson_is_never_of_zero_width_and_ends_exactly():
    lo, hi = stats.wilson(0, 7)
    assert lo == 0 < hi
    lo, hi = stats.wilson(7, 7)
    assert lo < 1 == hi


def test_wilson_with_fewer_independent_draws_is_that_of_the_smaller_sample():
    assert stats.wilson(80, 100, n_eff=10) == pytest.approx(stats.wilson(8, 10))
    lo, hi = stats.wilson(81, 100, n_eff=2.5)
    for end in (lo, hi):  # the equation that defines the ends, at a sample size that is no integer
        assert abs(0.81 - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / 2.5), rel=1e-4)


def test_wilson_without_a_draw_knows_nothing():
    assert stats.wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(0, 9), (1, 9), (5, 9), (4.5, 9), (9, 9), (2.5, 3.7)])
def test_the_sample_size_behind_an_interval_comes_back(successes, n):
    assert stats.n_behind(successes / n, *stats.wilson(successes, n)) == pytest.approx(n)


def test_design_effect_by_hand():
    # p = 1/2, per-sequence means 0, 1, 0, 1: variance 1/3, binomial variance of 4 tokens 1/16.
    assert stats.design_effect([0, 4, 0, 4], 4) == pytest.approx((1 / 3) / (1 / 16))
    # means 1/2, 1/2: no variance at all
    assert stats.design_effect([2, 2], 4) == 0
    # sizes 1 and 3, right 1 and 1: p 1/2, residuals 1/2 and -1/2, so 2 * 1/2 / (4 * 1/4)
    assert stats.design_effect([1, 1], [1, 3]) == pytest.approx(1.0)


def test_design_effect_of_independent_tokens_is_near_one():
    generator = np.random.default_rng(0)
    counts = generator.binomial(30, 0.7, size=4000)
    assert stats.design_effect(counts, 30) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("correct", "tokens"), [([3], 5), ([0, 0], 5), ([5, 5], 5), ([], 5)])
def test_design_effect_that_cannot_be_told_is_one(correct, tokens):
    assert stats.design_effect(correct, tokens) == 1.0


def test_effective_n_never_exceeds_the_tokens():
    assert stats.effective_n(100, 4) == 25
    assert stats.effective_n(100, 0.5) == 100


def seed_row(right, tokens, n_eff=None, sequences=10):
    lo, hi = stats.wilson(right, tokens, n_eff)
    acc = right / tokens
    return {"sequences": sequences, "token_acc": acc, "token_acc_lo": lo, "token_acc_hi": hi}


def test_pooling_seeds_is_one_interval_over_all_tokens():
    acc, lo, hi = stats.pool([seed_row(90, 100), seed_row(100, 100), seed_row(0, 100)])
    assert acc == pytest.approx(190 / 300)
    assert (lo, hi) == pytest.approx(stats.wilson(190, 300))


def test_pooling_keeps_each_design_effect_and_weighs_by_sequences():
    acc, lo, hi = stats.pool([seed_row(50, 100, n_eff=20), seed_row(300, 300, sequences=30)])
    assert acc == pytest.approx(350 / 400)
    assert (lo, hi) == pytest.approx(stats.wilson(350, 400, n_eff=320))


# -- one cell ------------------------------------------------------------------------------------


def test_skill():
    assert stats.skill(0.55, 0.1) == pytest.approx(0.5)
    assert stats.skill(0.0, 0.5) == -1
    assert math.isnan(stats.skill(1.0, 1.0))


@pytest.mark.parametrize(
    ("computes", "lo", "skill_hi", "trained", "expected"),
    [
        (False, 1.0, 1.0, True, "cannot"),
        (False, math.nan, math.nan, False, "cannot"),
        (True, 0.99, 1.0, False, "untrained"),
        (True, 0.0, 0.0, False, "untrained"),
        (True, 0.95, 0.97, True, "performs"),
        (True, 0.9499, 0.97, True, "degrades"),
        (True, 0.05, 0.10, True, "degrades"),
        (True, 0.05, 0.0999, True, "fails"),
    ],
)
def test_verdict_has_the_fixed_thresholds(computes, lo, skill_hi, trained, expected):
    assert stats.verdict(computes, lo, skill_hi, trained) == expected


def test_is_trained_at_the_threshold():
    assert stats.is_trained(0.95)
    assert not stats.is_trained(0.9499)
    assert not stats.is_trained(math.nan)


def test_worst_verdict():
    assert stats.worst(["performs", "fails", "degrades"]) == "fails"
    assert stats.worst(["cannot", "performs"]) == "cannot"


# -- summary numbers -----------------------------------------------------------------------------


def test_performs_to_stops_at_the_first_length_that_does_not():
    verdicts = {32: "fails", 64: "performs", 128: "performs", 512: "performs"}
    rows = curve({32: 0, 64: 1, 128: 1, 256: 0.5, 512: 1}, verdicts=verdicts)
    assert stats.performs_to(rows, 64) == 128
    assert stats.extrapolation_factor(rows, 64) == 2
    assert stats.performs_to(rows, 256) == 0
    assert stats.extrapolation_factor(rows, 256) == 0


def test_rows_are_selected_by_length_and_not_by_place():
    verdicts = {64: "performs", 65: "fails", 128: "performs"}
    rows = curve({128: 1, 65: 0, 64: 1}, verdicts=verdicts)
    assert stats.performs_to(rows, 64) == 64


def test_computes_to():
    rows = [row(64, 1), row(128, 0.1), row(256, math.nan, computes=False), row(512, 1)]
    assert stats.computes_to(rows, 64) == 128
    assert stats.computes_to(rows[2:], 64) == 0
    assert stats.computes_to([], 64) == 0


def test_effective_length_interpolates_in_octaves():
    # From 1.0 at 64 to 0.8 at 256 accuracy is 0.9 half way in log2: at 128.
    assert stats.effective_length(curve({64: 1.0, 256: 0.8}), 64) == pytest.approx((128, False))
    # 0.95 at 100, 0.75 at 1600: a quarter of four octaves.
    found = stats.effective_length(curve({1600: 0.75, 100: 0.95}), 100)
    assert found == pytest.approx((200, False))


def test_effective_length_needs_all_shorter_lengths_above():
    found = stats.effective_length(curve({64: 1.0, 128: 0.9, 256: 0.5, 512: 1.0}), 64)
    assert found == pytest.approx((128, False))
    assert stats.effective_length(curve({64: 0.89, 128: 1.0}), 64) == (0, False)


def test_effective_length_that_is_never_crossed_is_a_lower_bound():
    assert stats.effective_length(curve({64: 1.0, 128: 0.95}), 64) == (128, True)
    assert stats.effective_length(curve({64: 0.9, 128: 0.9}), 64) == (128, True)


def test_effective_length_stops_before_a_length_that_does_not_compute():
    rows = [*curve({64: 1.0, 128: 0.95}), row(256, math.nan, computes=False)]
    assert stats.effective_length(rows, 64) == (128, False)
    assert math.isnan(stats.effective_length([], 64).length)


def test_aulc_of_a_constant_curve():
    assert stats.aulc(curve({64: 1, 72: 1, 512: 1, 8192: 1}), 64) == pytest.approx(1)
    assert stats.aulc(curve({64: 0.25, 512: 0.25}), 64) == pytest.approx(0.25)


def test_aulc_by_hand():
    # skill 1, 1, 0.5, 0 at 0, 1, 2, 3 octaves: (1 + 0.75 + 0.25) / 3
    assert stats.aulc(curve({64: 1, 128: 1, 256: 0.5, 512: 0}), 64) == pytest.approx(2 / 3)


def test_aulc_cuts_at_8x_and_reads_between_lengths():
    # 1 at 0 octaves, 0 at 6: the line is 0.5 at 3, so the mean up to there is 0.75.
    assert stats.aulc(curve({64: 1, 4096: 0}), 64) == pytest.approx(0.75)
    # beyond 8x nothing counts once 8x itself is there
    assert stats.aulc(curve({64: 1, 512: 1, 4096: 0}), 64) == pytest.approx(1)


def test_aulc_clips_skill_and_counts_what_does_not_compute_as_none():
    below = [row(64, 1, chance=0.2), row(512, 0.1, chance=0.2)]  # skill 1 and below 0
    assert stats.aulc(below, 64) == pytest.approx(0.5)
    gone = [row(64, 1), row(128, math.nan, computes=False), row(512, math.nan, computes=False)]
    assert stats.aulc(gone, 64) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("accs", [{128: 1, 512: 1}, {64: 1, 256: 1}, {}])
def test_aulc_of_a_part_is_not_given(accs):
    assert math.isnan(stats.aulc(curve(accs), 64))


def test_aulc_ignores_lengths_below_the_training_length():
    assert stats.aulc(curve({32: 0, 64: 1, 512: 1}), 64) == pytest.approx(1)
