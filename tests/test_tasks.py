import math

import pytest
import torch

from posx.errors import UserError
from posx.seeds import generator
from posx.tasks.base import BOS, EOS, SEP, Task, Vocab, distinct
from posx.tasks.copy import Copy
from posx.tasks.sort import Sort

TASKS = [
    Copy(Vocab(11, 2)),
    Copy(Vocab(5), unique=False),
    Sort(Vocab(11, 2)),
    Sort(Vocab(32), unique=False),
]
IDS = ["copy", "copy repeats", "sort", "sort repeats"]


def test_split_writes_symbols_in_digits_and_specials_in_every_digit() -> None:
    vocab = Vocab(base=7, digits=3)
    tokens = torch.tensor([[0, 6, 7, 342, vocab.special(BOS), vocab.special(EOS)]])
    expected = [[0, 0, 0], [0, 0, 6], [0, 1, 0], [6, 6, 6], [7, 7, 7], [9, 9, 9]]
    assert vocab.split(tokens)[0].tolist() == expected


@pytest.mark.parametrize(("base", "digits"), [(1, 2), (7, 0)])
def test_vocab_refuses_no_choice(base: int, digits: int) -> None:
    with pytest.raises(UserError, match="base must be at least 2"):
        Vocab(base, digits)


@pytest.mark.parametrize("task", TASKS, ids=IDS)
@pytest.mark.parametrize("length", [5, 8, 17])
def test_layout(task: Task, length: int) -> None:
    batch = task.sample(generator("test", 0), 3, length)
    n = (length - 3) // 2
    assert batch.tokens.shape == (3, 2 * n + 3)
    assert (batch.tokens[:, 0] == task.vocab.special(BOS)).all()
    assert (batch.tokens[:, n + 1] == task.vocab.special(SEP)).all()
    assert (batch.tokens[:, -1] == task.vocab.special(EOS)).all()
    assert batch.prompt.shape[1] + batch.answer.shape[1] == batch.tokens.shape[1]
    x, y = batch.tokens[:, 1 : n + 1], batch.answer[:, :-1]
    assert ((x >= 0) & (x < task.vocab.size)).all()
    for given, answer in zip(x.tolist(), y.tolist(), strict=True):
        assert answer == (sorted(given) if task.name == "sort" else given)
        if task.unique:
            assert len(set(given)) == n


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_sampling_is_pure(task: Task) -> None:
    torch.manual_seed(1)
    first = task.sample(generator("test", 7), 4, 15).tokens
    torch.manual_seed(2)
    assert torch.equal(task.sample(generator("test", 7), 4, 15).tokens, first)
    assert not torch.equal(task.sample(generator("test", 8), 4, 15).tokens, first)


def test_streams_of_different_names_differ() -> None:
    names = [("train", 0, 1), ("train", 1, 0), ("check", 0, 1), ("eval", 0, 1), ("train", 0, 11)]
    seeds = {generator(*each).initial_seed() for each in names}
    assert len(seeds) == len(names)


def test_too_many_unique_symbols_are_refused() -> None:
    task = Copy(Vocab(5, 2))  # 25 symbols: up to 53 tokens
    task.check_length(54)
    with pytest.raises(UserError, match=r"length 55 needs 26 unique symbols, task copy has 25.*53"):
        task.check_length(55)
    Copy(Vocab(5, 2), unique=False).check_length(55)
    with pytest.raises(UserError, match="length 4 is too short"):
        task.check_length(4)


@pytest.mark.parametrize("width", [3, 5, 40])
def test_distinct_is_uniform_over_ordered_choices(width: int) -> None:
    """Both branches (nearly full and sparse rows): every ordered pair equally often."""
    draws = 20000
    pairs = distinct(generator("test", width), 2, torch.full((draws,), width))
    index = pairs[:, 0] * width + pairs[:, 1]
    counts = torch.bincount(index, minlength=width * width).view(width, width)
    assert counts.diagonal().sum() == 0
    cells = width * (width - 1)
    mean = draws / cells
    off = counts[~torch.eye(width, dtype=torch.bool)].double()
    chi2 = float(((off - mean) ** 2 / mean).sum())
    # chi-squared with cells - 1 degrees of freedom: 5 standard deviations above its mean
    assert chi2 < cells - 1 + 5 * math.sqrt(2 * cells)


def test_distinct_fills_a_full_row() -> None:
    rows = distinct(generator("test"), 6, torch.tensor([6, 100, 6]))
    assert rows[0].sort().values.tolist() == list(range(6))
    assert len(set(rows[1].tolist())) == 6


def test_sort_windows_are_log_uniform() -> None:
    task = Sort(Vocab(128, 2))
    widths = task.widths(torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1], n=30)
    assert widths.min() == 30
    assert widths.max() <= task.vocab.size
    # half of the windows are below the geometric mean of the ends
    assert abs(float((widths < math.sqrt(30 * task.vocab.size)).double().mean()) - 0.5) < 0.01


def test_chance_of_unique_copy_is_the_harmonic_mean() -> None:
    n = 30
    expected = sum(1 / r for r in range(1, n + 1)) / n
    assert Copy(Vocab(128, 2)).chance(63) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(0.133, abs=5e-4)


def test_chance_of_sort_is_the_best_of_its_baselines() -> None:
    dense = Sort(Vocab(16))  # 14 of 16 symbols: the successor is nearly always right
    assert 0.7 < dense.chance(31) < 1
    sparse = Sort(Vocab(128, 3))  # 2 million symbols: windows are wide, the bag is best
    assert sparse.chance(13) == pytest.approx(sum(1 / r for r in range(1, 6)) / 5)
    repeats = Sort(Vocab(2), unique=False)  # two symbols: the last one again
    assert repeats.chance(203) > 0.95


def test_chance_of_copy_with_repeats_counts_the_most_frequent_symbol() -> None:
    one = Copy(Vocab(2), unique=False).chance(203)
    assert 0.5 < one < 0.75  # a fair coin, more at the end where few are left
    assert Copy(Vocab(50, 2), unique=False).chance(203) < 0.1


@pytest.mark.parametrize("task", TASKS, ids=IDS)
def test_oracle_beats_chance(task: Task) -> None:
    """The task's own answer is right everywhere; its baseline is not."""
    batch = task.sample(generator("test", 3), 5, 27)
    assert torch.equal(task.solve(batch.prompt[:, 1:-1]), batch.answer[:, :-1])
    assert task.chance(27) < 1
