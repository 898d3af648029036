"""What one cell of eval.csv says, against loops, oracles and real generation."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_posx
from test_conformance import SCHEMES, subject
from test_model import CONFIG
from test_train import only_run
from torch import Tensor

from posx import catalog, measure, memory, metrics, stats
from posx.build import load_yaml, make_extension, make_scheme, make_task
from posx.config import Config, ModelConfig, loads
from posx.generate import greedy
from posx.measure import Budget, draw, overlap, summarise
from posx.model import Transformer
from posx.tasks.base import Batch, Task, Vocab
from posx.tasks.copy import Copy
from posx.tasks.sort import Sort
from posx.train import training_batch


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    from conftest import QUICK

    folder = tmp_path_factory.mktemp("measure")
    run_posx(folder, "train", "scheme=nope", *QUICK)
    return loads((only_run(folder) / "config.yaml").read_text(), "here")


def model_of(scheme: str, task: Task, train_len: int = 16) -> Transformer:
    node = load_yaml(catalog.find("scheme", scheme))
    shape = ModelConfig(**CONFIG)
    return Transformer(shape, task.vocab, partial(make_scheme, node), train_len).eval()


# -- sequences -----------------------------------------------------------------------------------


def test_every_scheme_sees_the_same_sequences() -> None:
    task = Copy(Vocab(7, 2))
    first = draw(task, 20, Budget(sequences=3)).tokens
    torch.manual_seed(9)
    assert torch.equal(draw(task, 20, Budget(sequences=3)).tokens, first)
    assert not torch.equal(draw(task, 20, Budget(sequences=3, seed=1)).tokens, first)


def test_available_memory_counts_what_the_kernel_would_give_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 1024 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available(torch.device("cpu")) == 8192
    (tmp_path / "memory.max").write_text(str(3 * 2**30))
    (tmp_path / "memory.current").write_text(str(2**30))
    assert memory.available(torch.device("cpu")) == 2048


@pytest.mark.parametrize(("length", "expected"), [(64, 134), (512, 16), (8192, 4)])
def test_enough_sequences_for_4000_tokens(length: int, expected: int) -> None:
    assert measure.n_sequences(Copy(Vocab(128, 2)), length, Budget()) == expected
    assert measure.n_sequences(Copy(Vocab(128, 2)), length, Budget(sequences=2)) == 2


def test_overlap_counts_sequences_that_training_drew(config: Config) -> None:
    task = make_task(config)
    trained, _ = training_batch(config, task, 3)
    n = trained.n_answer - 1
    fresh = task.sample(torch.Generator().manual_seed(0), 4, 2 * n + 3).tokens
    fresh[1] = trained.tokens[0]
    fresh[2] = trained.tokens[0]
    batch = Batch(fresh, trained.n_answer)
    assert overlap(batch, task, config, steps=4) == 2
    assert overlap(batch, task, config, steps=3) == 0


def test_short_payloads_overlap_and_it_shows(config: Config) -> None:
    """One symbol of a vocabulary of 7: training has seen them all."""
    task = Copy(Vocab(7))
    law = replace(config.train, tokens_per_step=2000)
    batch = draw(task, 5, Budget(sequences=50))
    assert overlap(batch, task, replace(config, train=law), steps=12) == 50


# -- aggregation ---------------------------------------------------------------------------------


def test_summary_against_a_loop() -> None:
    random = torch.Generator().manual_seed(0)
    right = torch.rand(5, 12, generator=random) < 0.7  # 11 payload tokens and EOS
    right[0] = True
    got = summarise(right, n_in=4, chance=0.25)
    rows = right.tolist()
    payload = [row[:-1] for row in rows]
    flat = [token for row in payload for token in row]
    assert got["token_acc"] == pytest.approx(sum(flat) / len(flat))
    assert got["exact_match"] == pytest.approx(sum(all(row) for row in rows) / 5)
    shares = [(row.index(False) if False in row else len(row)) / len(row) for row in rows]
    assert got["first_error"] == pytest.approx(sum(shares) / 5)
    assert got["acc_in"] == pytest.approx(sum(sum(row[:4]) for row in payload) / 20)
    assert got["acc_out"] == pytest.approx(sum(sum(row[4:]) for row in payload) / 35)
    assert got["skill"] == pytest.approx((got["token_acc"] - 0.25) / 0.75)
    deff = stats.design_effect([sum(row) for row in payload], 11)
    low, high = stats.wilson(sum(flat), 55, 55 / max(1, deff))
    assert (got["token_acc_lo"], got["token_acc_hi"]) == pytest.approx((low, high))


@pytest.mark.parametrize("wrong", [0, 5, 10])
def test_one_wrong_token_counts_once_wherever_it_stands(wrong: int) -> None:
    right = torch.ones(1, 12, dtype=torch.bool)
    right[0, wrong] = False
    got = summarise(right, n_in=30, chance=0.0)
    assert got["token_acc"] == pytest.approx(10 / 11)
    assert got["exact_match"] == 0
    assert got["first_error"] == pytest.approx(wrong / 12)
    assert got["acc_out"] is None


def test_a_wrong_end_spoils_the_exact_match_only() -> None:
    right = torch.ones(2, 12, dtype=torch.bool)
    right[0, -1] = False
    got = summarise(right, n_in=30, chance=0.0)
    assert (got["token_acc"], got["exact_match"]) == (1.0, 0.5)


# -- oracles -------------------------------------------------------------------------------------


class Fixed(Transformer):
    """A model that answers what `answers` says, whatever the weights."""

    answers: Any

    def answer(self, batch: Batch, generator: Any = None) -> tuple[Tensor, Tensor]:
        _, digits = super().answer(batch, generator)
        said = self.answers(digits)
        return torch.nn.functional.one_hot(said, self.vocab.rows).float(), digits


def fixed(task: Task, answers: Any) -> Transformer:
    model = model_of("nope", task)
    model.__class__ = Fixed
    model.answers = answers
    return model


@pytest.mark.parametrize("task", [Copy(Vocab(31, 2)), Sort(Vocab(31, 2))], ids=["copy", "sort"])
@pytest.mark.parametrize("length", [16, 40, 200])
def test_oracle_scores_one_and_random_scores_chance(
    task: Task, length: int, config: Config
) -> None:
    cell = partial(measure.measure, task=task, config=config, length=length, budget=Budget())
    perfect = cell(fixed(task, lambda digits: digits))
    assert (perfect["token_acc"], perfect["exact_match"], perfect["skill"]) == (1, 1, 1)
    assert perfect["first_error"] == 1

    def guess(digits: Tensor) -> Tensor:
        return torch.randint(task.vocab.base, digits.shape)

    random = cell(fixed(task, guess))
    tokens = random["sequences"] * random["items"]
    spread = 3 * (1 / task.vocab.size / tokens) ** 0.5  # 3 sigma around 1 / V
    assert abs(random["token_acc"] - 1 / task.vocab.size) < spread
    assert random["skill"] < 0.01


# -- computes ------------------------------------------------------------------------------------


def cell_of(model: Transformer, task: Task, config: Config, **budget: Any) -> dict[str, Any]:
    length = budget.pop("length", 24)
    return measure.measure(model, task, config, length, Budget(sequences=2, **budget))


def test_beyond_the_table_is_out_of_range(config: Config) -> None:
    task = Copy(Vocab(7, 2))
    row = cell_of(model_of("learned", task), task, config)
    assert (row["computes"], row["status"]) == (False, "out_of_range")
    assert "23 tokens, the scheme's longest length is 16" in row["reason"]
    assert row["chance"] > 0  # the cell is there, with what is known of it


def test_extension_makes_the_table_compute(config: Config) -> None:
    task = Copy(Vocab(7, 2))
    model = model_of("learned", task)
    extension = make_extension(load_yaml(catalog.find("extension", "interpolate")))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    row = measure.measure(model, task, config, 24, Budget(sequences=2), extension)
    assert row["computes"]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_over_memory_is_predicted_before_the_start(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Copy(Vocab(7, 2))
    model = model_of("nope", task)
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: pytest.fail("it started"))
    monkeypatch.setattr(measure, "draw", lambda *_: pytest.fail("it drew"))
    row = cell_of(model, task, config, max_memory=1.0)
    assert row["status"] == "over_memory"
    assert "the budget is 1 MiB (--max-memory)" in row["reason"]


def test_prediction_bounds_the_measured_peak(config: Config) -> None:
    task = Copy(Vocab(31, 2))
    for scheme, length, sequences in (
        ("nope", 1900, 4),
        ("alibi", 1900, 4),
        ("shaw", 1900, 4),
        ("shaw", 1000, 8),  # dense: scores of 1000 x 1000
    ):
        model = model_of(scheme, task)
        row = measure.measure(model, task, config, length, Budget(sequences=sequences))
        assert row["peak_mb"] <= measure.predict_mib(model, length, sequences), scheme


def test_out_of_memory_and_other_errors_become_a_status(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Copy(Vocab(7, 2))
    model = model_of("nope", task)
    for error, status in (
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "over_memory"),
        (RuntimeError("shapes do not match"), "error"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(Transformer, "forward", fail)
        row = cell_of(model, task, config)
        assert (row["status"], row["reason"]) == (status, str(error))


def test_non_finite_logits_do_not_compute(config: Config) -> None:
    task = Copy(Vocab(7, 2))
    model = model_of("nope", task)
    with torch.no_grad():
        model.layers[0].up.weight[0, 0] = torch.inf
    assert cell_of(model, task, config)["status"] == "non_finite"


def test_over_time_says_how_far_it_came(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Copy(Vocab(7, 2))
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    row = cell_of(model_of("nope", task), task, config, max_seconds=10.0)
    assert row["status"] == "over_time"
    assert row["reason"] == "20 s for 2 of 2 sequences, the budget is 10 s (--max-seconds)"


def test_the_whole_input_is_seen(config: Config) -> None:
    """No silent cropping: the first symbol changes the last logits at a long length."""
    task = Copy(Vocab(31, 2))
    model = model_of("nope", task)
    digits = model.vocab.split(draw(task, 1500, Budget(sequences=1)).tokens)
    other = digits.clone()
    other[:, 1] = (other[:, 1] + 1) % 31
    with torch.no_grad():
        assert (model(other, last=1) - model(digits, last=1)).abs().max() > 0


# -- teacher forcing against free running ----------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_first_error_and_exact_match_are_those_of_generation(name: str) -> None:
    """Greedy generation with a cache, against one teacher-forced pass, for a model that is trained
    on the very sequences until its answers are right for a while and then wrong."""
    task = Copy(Vocab(5, 2), unique=True)
    model = model_of(name, task, train_len=24)
    for parameter in model.schemes.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = task.sample(torch.Generator().manual_seed(5), 6, 17)
    right = torch.zeros(1, 1)
    while metrics.first_error(right).mean() < 0.3:
        logits, digits = model.answer(batch)
        right = metrics.right(logits, digits)
        loss = metrics.loss(logits, digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits, digits = model.answer(batch)
        right = metrics.right(logits, digits)
        prompt = model.vocab.split(batch.prompt)
        made = (greedy(model, prompt, batch.n_answer) == digits).all(-1)
    forced, free = metrics.first_error(right), metrics.first_error(made)
    assert torch.equal(forced, free)
    assert torch.equal(right.all(1), made.all(1))
    assert 0 < forced.mean() < 1  # some tokens right and some wrong, or the test says nothing


def test_cached_generation_equals_recomputation() -> None:
    made = []
    for kv in (True, False):
        model = subject("rope").model()
        for scheme in model.schemes:
            scheme.kv = kv
        prompt = model.vocab.split(
            torch.randint(49, (2, 6), generator=torch.Generator().manual_seed(1))
        )
        made.append(greedy(model, prompt, 9))
    assert torch.equal(*made)


def test_generated_accuracy_is_written_on_request(trained: Path) -> None:
    import pandas as pd

    words = ("eval", "scheme=rope", "--lengths", "20", "--sequences", "2")
    (run,) = (trained / "results" / "runs").glob("*/rope/*")
    run_posx(trained, *words)
    assert pd.read_csv(run / "eval.csv")["generated_acc"].isna().all()
    run_posx(trained, *words, "--generate")
    assert pd.read_csv(run / "eval.csv")["generated_acc"].between(0, 1).all()


def test_generated_accuracy_against_a_loop(config: Config) -> None:
    task = Copy(Vocab(5, 2))
    model = model_of("rope", task)
    row = cell_of(model, task, config, length=15, generate=True)
    batch = draw(task, 15, Budget(sequences=2))
    right = 0
    for tokens in batch.tokens:
        sequence = model.vocab.split(tokens[None, : -batch.n_answer])
        for expected in model.vocab.split(tokens[None, -batch.n_answer : -1])[0]:
            with torch.no_grad():
                made = model(sequence)[:, -1:].argmax(-1)
            right += bool((made[0, 0] == expected).all())
            sequence = torch.cat([sequence, made], 1)
    assert row["generated_acc"] == right / (2 * (batch.n_answer - 1))
