"""Drawn positions against their laws, and every attention path at positions of each sequence."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import SITE, B, E, S, T, close

from posx.attention import DENSE, attend
from posx.conformance import Layer, by_rows, layer
from posx.errors import UserError
from posx.schemes.absolute import Learned, Sinusoidal
from posx.schemes.base import Nope, Scheme, Site
from posx.schemes.bias import T5, Alibi
from posx.schemes.mask import Window
from posx.schemes.relative import Shaw
from posx.schemes.rotary import Rope
from posx.schemes.sampling import (
    Abacus,
    Cape,
    PosCoupling,
    Pose,
    Randomized,
    Rfs,
    Shape,
    first_end,
    places,
)
from posx.tasks.base import Vocab
from posx.tasks.copy import Copy

INNER = [Nope, Learned, Sinusoidal, Rope, Alibi, T5, Shaw, Window]


def symbols(batch: int = B, n: int = T) -> torch.Tensor:
    return torch.ones(batch, n, dtype=torch.bool)


def random(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(scheme: Scheme, n: int, count: int = 1, batch: int = 1) -> torch.Tensor:
    """(count, batch or 1, n): training draws of one generator."""
    generator = random()
    rows = [scheme.positions(symbols(batch, n), 0, generator) for _ in range(count)]
    return torch.stack([row.expand(batch, n) for row in rows])


# -- randomized ----------------------------------------------------------------------------------


def test_randomized_draws_every_set_equally_often():
    scheme = Randomized(Site(E, 3, 8, 3, seen=3), Rope, max_len=5)
    got = Counter(tuple(row.tolist()) for row in draws(scheme, 3, 2000)[:, 0])
    sets = {(a, b, c) for a in range(5) for b in range(a + 1, 5) for c in range(b + 1, 5)}
    assert got.keys() == sets
    # 2000 draws of 10 sets: 200 each, standard deviation 13
    assert all(abs(count - 200) < 55 for count in got.values())


def test_randomized_shares_its_draw_unless_told():
    shared = Randomized(SITE, Rope).positions(symbols(), 0, random())
    assert shared.shape == (T,)
    own = Randomized(SITE, Rope, per_sequence=True).positions(symbols(), 0, random())
    assert own.shape == (B, T)
    assert not torch.equal(own[0], own[1])
    for drawn in (shared, *own):
        assert drawn.dtype == torch.int64
        assert (drawn.diff() > 0).all()
        assert drawn[0] >= 0
        assert drawn[-1] < 2048


def test_randomized_grid_is_even():
    scheme = Randomized(SITE, Rope, max_len=100, evaluate="grid")
    for n in (1, 2, 7, 99, 100):
        want = [t * 100 // n for t in range(n)]
        assert scheme.positions(symbols(B, n), 0, None).tolist() == want


def test_randomized_evaluates_at_one_sample_a_length():
    scheme = Randomized(SITE, Rope)
    first = {n: scheme.positions(symbols(B, n), 0, None) for n in (T, S)}
    torch.manual_seed(5)
    again = Randomized(SITE, Learned)
    for n, drawn in first.items():
        assert torch.equal(again.positions(symbols(7, n), 0, None), drawn)
        assert len(set(drawn.tolist())) == n
        assert torch.equal(drawn, drawn.sort().values)
    assert not torch.equal(first[S][:T], first[T])  # another draw, not a prefix
    assert torch.equal(scheme.positions(symbols(B, 2), T - 2, None), first[T][-2:])


def test_randomized_scheme_sees_the_drawn_positions():
    scheme = Randomized(SITE, Learned, max_len=40)
    assert isinstance(scheme.over, Learned)
    assert scheme.site == SITE  # the tokens of training are as many as before
    assert scheme.over.site.train_len == scheme.over.site.positions == len(scheme.over.table) == 40
    pos = scheme.positions(symbols(), 0, random())
    got = scheme.embed(torch.zeros(B, T, E), pos)
    for t, p in enumerate(pos.tolist()):
        assert torch.equal(got[1, t], scheme.over.table[p])


def test_randomized_beyond_its_range():
    scheme = Randomized(SITE, Rope, max_len=S)
    assert scheme.max_len == S
    assert scheme.positions(symbols(B, S), 0, random()).tolist() == list(range(S))
    with pytest.raises(UserError, match=r"length 10 is beyond max_len 9.*scheme.max_len=10"):
        scheme.positions(symbols(B, S + 1), 0, None)
    with pytest.raises(UserError, match=r"length 10 is beyond max_len 9"):
        scheme.positions(symbols(B, 1), S, None)


# -- every path at positions of each sequence ----------------------------------------------------


@pytest.mark.parametrize("n", [1, 37, DENSE + 77])
@pytest.mark.parametrize("over", INNER, ids=lambda inner: inner.__name__)
def test_paths_at_drawn_positions(over: Callable[[Site], Scheme], n: int):
    """(B, T) positions through folded, dense, banded and blocks equal a float64 loop."""
    scheme = Randomized(Site(E, 3, 8, 16), over, per_sequence=True)
    given = layer(scheme, n)
    pos = scheme.positions(symbols(B, n), 0, random())  # (B, T)
    q, k, v, state = scheme.prepare(torch.zeros(B, n, E), given.q, given.k, given.v, pos, None)
    given = Layer(scheme, q, k, v, pos, state)
    last = min(n, 8)
    want = by_rows(given, last)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            got = attend(scheme, q, k, v, pos, pos, state)
        # training folds ALiBi: products near 2000 / sqrt(8) are rounded by 6e-5
        close(got[:, :, -last:], want, atol=2e-4 if training else 2e-5)


def test_rotated_angles_are_those_of_the_drawn_positions():
    scheme = Randomized(SITE, Rope, per_sequence=True)
    pos = scheme.positions(symbols(), 0, random())
    q, k, v = torch.randn(3, B, 3, T, 8)
    got = scheme.prepare(torch.zeros(B, T, E), q, k, v, pos, None)[0]
    for b in range(B):
        alone = Rope(SITE).prepare(torch.zeros(1, T, E), q[b : b + 1], k, v, pos[b], None)[0]
        assert torch.equal(got[b : b + 1], alone)


# -- shape, cape ---------------------------------------------------------------------------------


def test_shape_shifts_each_sequence_by_up_to_its_maximum():
    scheme = Shape(SITE, Sinusoidal, max_shift=2)
    drawn = draws(scheme, T, 50, batch=4)
    shift = drawn - torch.arange(T)
    assert torch.equal(shift, shift[..., :1].expand_as(shift))
    assert set(shift.unique().tolist()) == {0, 1, 2}
    assert any(len(set(row.tolist())) > 1 for row in shift[..., 0])
    assert scheme.positions(symbols(), 3, None).tolist() == [3, 4, 5, 6, 7]
    as_published = Shape(SITE, Sinusoidal, max_shift=2, eval_shift=2)
    assert as_published.positions(symbols(), 3, None).tolist() == [5, 6, 7, 8, 9]


def test_shape_gives_a_table_the_rows_that_it_needs():
    scheme = Shape(Site(E, 3, 8, train_len=16, seen=15), Learned, max_shift=20, eval_shift=4)
    assert isinstance(scheme.over, Learned)
    assert len(scheme.over.table) == 36
    assert scheme.over.site.positions == 35
    assert scheme.max_len == 32
    drawn = draws(scheme, 16, 100)
    assert drawn.max() == 35
    assert scheme.positions(symbols(1, 32), 0, None)[-1] == 35
    with pytest.raises(UserError, match=r"length 33 is beyond max_len 32"):
        scheme.positions(symbols(1, 33), 0, None)
    assert Shape(SITE, Sinusoidal).max_len is None


def test_cape_parts_one_by_one():
    place = torch.arange(T)
    shift = draws(Cape(SITE, Sinusoidal, 5.0, 0.0, 1.0), T, 200, batch=3) - place
    close(shift, shift[..., :1].expand_as(shift), atol=1e-6)
    assert -5 <= shift.min() < -4.5
    assert 4.5 < shift.max() <= 5
    jitter = draws(Cape(SITE, Sinusoidal, 0.0, 0.5, 1.0), T, 200, batch=3) - place
    assert -0.5 <= jitter.min() < -0.49
    assert 0.49 < jitter.max() <= 0.5
    assert (jitter.diff(dim=-1).abs() > 1e-4).float().mean() > 0.99  # one a token
    stretch = draws(Cape(SITE, Sinusoidal, 0.0, 0.0, 4.0), T, 200, batch=3)
    assert (stretch[..., 0] == 0).all()
    factor = stretch[..., 1:] / place[1:]
    close(factor, factor[..., :1].expand_as(factor), atol=1e-5)
    log = factor[..., 0].log() / math.log(4)
    assert -1 <= log.min() < -0.97
    assert 0.97 < log.max() <= 1
    assert log.mean().abs() < 0.07  # 600 draws of standard deviation 0.58: 0.024


def test_cape_shifts_before_it_stretches():
    drawn = draws(Cape(SITE, Sinusoidal, 5.0, 0.0, 4.0), T, 200)
    factor = drawn[..., 1] - drawn[..., 0]
    assert (drawn[..., 0] / factor).abs().max() <= 5 + 1e-4
    assert drawn[..., 0].abs().max() > 10


def test_cape_evaluates_at_the_counted_positions():
    assert Cape(SITE, Rope).positions(symbols(), 3, None).tolist() == [3, 4, 5, 6, 7]
    assert Cape(SITE, Rope).positions(symbols(), 0, random()).dtype == torch.float32


# -- rfs, pose -----------------------------------------------------------------------------------


def test_rfs_grid_and_draws():
    scheme = Rfs(Site(E, 3, 8, train_len=16, seen=15), Sinusoidal, scale=1.0)
    for n in (1, 14, 15, 16, 40):
        want = [(2 * i - 1) / (2 * max(15, n)) for i in range(1, n + 1)]
        close(scheme.positions(symbols(B, n), 0, None), want, atol=1e-7)
    drawn = draws(scheme, T, 400, batch=2)
    assert (drawn.diff(dim=-1) >= 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # order statistics of uniform numbers: mean i / (n + 1), standard error 0.007 at most
    close(drawn.mean((0, 1)), [i / (T + 1) for i in range(1, T + 1)], atol=0.025)


def test_rfs_scale_stretches_all_positions():
    site = Site(E, 3, 8, train_len=16, seen=15)
    for generator in (None, 1):
        bare, wide, default = (
            scheme.positions(symbols(), 0, None if generator is None else random())
            for scheme in (
                Rfs(site, Rope, scale=1.0),
                Rfs(site, Rope, scale=7.0),
                Rfs(site, Rope),
            )
        )
        close(wide, 7 * bare.double(), atol=1e-6)
        close(default, 15 * bare.double(), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pose_skips_once(n):
    scheme = Pose(Site(E, 3, 8, 8), Rope, target_len=10)
    firsts, skips = set(), set()
    for row in draws(scheme, n, 300, batch=2).flatten(0, 1):
        shift = (row - torch.arange(n)).tolist()
        assert shift[0] == 0
        assert shift == sorted(shift)
        assert len(set(shift)) <= 2
        assert row[-1] < 10
        skips.add(shift[-1])
        if shift[-1]:
            firsts.add(shift.count(0))
    if n == 1:
        assert skips == {0}
    else:
        assert skips == set(range(10 - n + 1))
        assert firsts == set(range(1, (n + 1) // 2 + 1))
    assert scheme.positions(symbols(), 3, None).tolist() == [3, 4, 5, 6, 7]


def test_pose_trains_the_rows_that_evaluation_reads():
    scheme = Pose(SITE, Learned, target_len=50)
    assert scheme.max_len == 50
    assert scheme.over.site.positions == 50


# -- positions of runs of symbols ----------------------------------------------------------------

VOCAB = Vocab(base=7)
# BOS x1 x2 x3 SEP y1 y2 y3, and what else a mask of symbols may look like
RUNS = [
    ("0111 0111", "0123 0123", "0000 1000"),
    ("1101 1000", "1201 2000", "0010 0000"),
    ("0000 0011", "0000 0012", "0000 0000"),
    ("0100 1011", "0100 1012", "0010 0000"),
    ("1111 1111", "1234 5678", "0000 0000"),
]


def digits(text: str) -> list[int]:
    return [int(c) for c in text.replace(" ", "")]


def test_places_and_the_end_of_the_first_run():
    runs, place, end = (torch.tensor([digits(row[c]) for row in RUNS]) for c in range(3))
    assert torch.equal(places(runs.bool()), place)
    assert torch.equal(first_end(runs.bool()), end.bool())


def copy_symbols(n: int, batch: int = B) -> torch.Tensor:
    """Which inputs of a copy sequence of n payload symbols are symbols: (batch, 2n + 2)."""
    tokens = Copy(VOCAB, unique=False).sample(random(), batch, 2 * n + 3).tokens
    return VOCAB.split(tokens[:, :-1])[..., 0] < VOCAB.base


def test_abacus_counts_in_payload_and_answer():
    scheme = Abacus(SITE, Learned)
    want = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert scheme.positions(copy_symbols(4), 0, None).tolist() == [want] * B
    starts = set()
    generator = random()
    for _ in range(300):
        drawn = Abacus(SITE, Learned, max_shift=3).positions(copy_symbols(4), 0, generator)
        shift = int(drawn[0, 1]) - 1
        starts.add(shift)
        assert drawn.tolist() == [[p and p + shift for p in want]] * B
    assert starts == {0, 1, 2, 3}


def test_abacus_never_leaves_its_table():
    scheme = Abacus(SITE, Learned, max_len=6, max_shift=3)
    assert isinstance(scheme.over, Learned)
    assert len(scheme.over.table) == 7
    drawn = torch.stack([scheme.positions(copy_symbols(5), 0, random(s)) for s in range(40)])
    assert drawn.max() == 6
    assert drawn[..., 1].unique().tolist() == [1, 2]
    with pytest.raises(UserError, match=r"7 symbols in a row are beyond max_len 6.*max_len=7"):
        scheme.positions(copy_symbols(7), 0, None)
    assert Abacus(SITE, Learned, max_shift=3).over.site.positions == 16 + 3 + 1  # and row 0


def test_coupled_positions_are_those_of_the_published_copy_task():
    scheme = PosCoupling(SITE, Learned, max_len=6)
    want = [0, 2, 3, 4, 5, 1, 2, 3, 4, 5]  # BOS x SEP y: x_i and y_i agree
    assert scheme.positions(copy_symbols(4), 0, None).tolist() == [want] * B
    starts = set()
    generator = random()
    for _ in range(200):
        drawn = scheme.positions(copy_symbols(4), 0, generator)
        for row in drawn.tolist():
            start = row[5]
            starts.add(start)
            assert row == [p and p + start - 1 for p in want]
    assert starts == {1, 2, 3}  # 1 .. max_len + 1 - n
    assert isinstance(scheme.over, Learned)
    assert len(scheme.over.table) == 8  # the last symbol of the last start has row 3 + 4 = 7


def test_coupled_positions_beyond_the_table():
    scheme = PosCoupling(SITE, Learned, max_len=6)
    for generator in (None, random()):
        assert int(scheme.positions(copy_symbols(6), 0, generator).max()) == 7
        with pytest.raises(UserError, match=r"7 symbols in a row are beyond max_len 6"):
            scheme.positions(copy_symbols(7), 0, generator)


def test_coupled_end_has_position_zero():
    ended = torch.tensor([digits("0110 1100")]).bool()  # BOS x1 x2 SEP y1 y2 EOS, and a token
    got = PosCoupling(SITE, Sinusoidal).positions(ended, 0, None)
    assert got.tolist() == [[0, 2, 3, 1, 2, 3, 0, 0]]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(Randomized, over=Rope, max_len=0), "randomized: max_len is 0; it must be"),
        (partial(Randomized, over=Rope, evaluate="mean"), "evaluate 'mean' is not known"),
        (
            partial(Randomized, over=partial(Learned, max_len=64)),
            "randomized: max_len 64 of the Learned inside it is below the 2048 positions",
        ),
        (
            partial(Randomized, over=partial(Shape, over=Sinusoidal)),
            "randomized: Shape inside it chooses positions as well",
        ),
        (partial(Shape, over=Sinusoidal, max_shift=-1), "shape: max_shift is -1"),
        (partial(Shape, over=Rope), "shape: Rope sees distances alone"),
        (
            partial(Shape, over=partial(Learned, max_len=100)),
            "shape: max_len 100 of the Learned inside it is below the 516 positions",
        ),
        (
            partial(Cape, over=Rope, global_scaling=0.9),
            "cape: global_shift 5.0, .* global_scaling 0.9",
        ),
        (partial(Cape, over=Learned), "cape: Learned inside it has no value between whole"),
        (partial(Rfs, over=T5), "rfs: T5 inside it has no value between whole positions"),
        (partial(Rfs, over=Rope, scale=0.0), "rfs: scale is 0.0; it must be above 0"),
        (partial(Pose, over=Rope, target_len=15), "pose: target_len is 15.* at least the 16"),
        (
            partial(Pose, over=partial(Learned, max_len=64)),
            "pose: max_len 64 of the Learned inside it is below the 2048 positions",
        ),
        (partial(Abacus, over=Learned, max_len=0), "abacus: max_len is 0 and max_shift 99"),
        (partial(Abacus, over=Alibi), "abacus: Alibi inside it needs positions that rise"),
        (partial(PosCoupling, over=Window), "pos_coupling: Window inside it needs positions that"),
        (partial(PosCoupling, over=Learned, max_len=0), "pos_coupling: max_len is 0; it must be"),
    ],
)
def test_refusals(make: Callable[[Site], Scheme], text: str):
    with pytest.raises(UserError, match=text):
        make(SITE)
