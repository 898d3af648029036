import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import HERE, QUICK, Posx, run_posx
from safetensors.torch import load_file

from posx import runs, sweep, train
from posx.build import make_task
from posx.config import Config, loads
from posx.train import State, draw_items, last_step, rate, training_batch

TIMES = ["tokens_per_s"]  # the only column that depends on the clock


def only_run(folder: Path) -> Path:
    (found,) = (folder / "results" / "runs").glob("*/*/*")
    return found


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def config_of(run: Path) -> Config:
    return loads((run / "config.yaml").read_text(), str(run))


def assert_same_run(one: Path, other: Path) -> None:
    """Weights and tables equal bit for bit, clock readings left out."""
    first, second = (load_file(run / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
    tables = [pd.read_csv(run / "train.csv").drop(columns=TIMES) for run in (one, other)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_posx(folder, "train", *QUICK)
    return only_run(folder)


def test_run_folder_holds_all_that_is_promised(undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} >= {
        "config.yaml",
        "run.json",
        "train.csv",
        "model.safetensors",
    }
    facts = record(undisturbed)
    assert facts["status"] == "finished"
    assert facts["converged"] is False  # 12 steps teach nothing, and the record says so
    assert facts["steps"] == 12
    assert facts["tokens"] == pd.read_csv(undisturbed / "train.csv")["tokens"].iloc[-1]
    assert undisturbed.name == f"seed0-{facts['hash'][:8]}"
    assert config_of(undisturbed).digest() == facts["hash"]


def test_finished_run_is_not_trained_again(posx: Posx, tmp_path: Path) -> None:
    posx("train", *QUICK)
    before = {path: path.stat().st_mtime_ns for path in only_run(tmp_path).iterdir()}
    again = posx("train", *QUICK)
    assert "already trained" in again.stderr
    after = {path: path.stat().st_mtime_ns for path in only_run(tmp_path).iterdir()}
    del before[only_run(tmp_path) / ".lock"], after[only_run(tmp_path) / ".lock"]
    assert after == before


class Strike:
    """In the place of `train._step`: sends this process a signal at the start of one step."""

    def __init__(self, call: int, number: int) -> None:
        self.step, self.left, self.number = train._step, call, number

    def __call__(self, *arguments: Any) -> tuple[float, float]:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        return self.step(*arguments)


def struck(folder: Path, call: int, number: int) -> subprocess.CompletedProcess[bytes]:
    """The quick run in a process of its own, which dies at the start of one step."""
    code = (
        "from test_train import Strike, train\n"
        f"train._step = Strike({call}, {number})\n"
        "from posx.cli import app\n"
        "app()\n"
    )
    searched = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    command = [sys.executable, "-c", code, "train", *QUICK]
    return subprocess.run(command, cwd=folder, env=path, capture_output=True, timeout=300)


@pytest.mark.parametrize("call", [1, 8])
def test_killed_run_ends_bit_identical(call: int, tmp_path: Path, undisturbed: Path) -> None:
    assert struck(tmp_path, call, signal.SIGKILL).returncode == -signal.SIGKILL
    assert record(only_run(tmp_path))["status"] == "running"
    run_posx(tmp_path, "train", *QUICK)
    assert_same_run(only_run(tmp_path), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_it_saves_and_goes_on(
    number: signal.Signals, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(train, "_step", Strike(5, number))
        done = run_posx(tmp_path, "train", *QUICK, code=128 + number)
    assert done.stderr.strip().endswith("the same command goes on")
    facts = record(only_run(tmp_path))
    assert (facts["status"], facts["steps"]) == ("interrupted", 5)
    again = run_posx(tmp_path, "train", *QUICK)
    assert "goes on at step 5" in again.stderr
    assert_same_run(only_run(tmp_path), undisturbed)


def test_broken_checkpoint_starts_over(tmp_path: Path, undisturbed: Path) -> None:
    struck(tmp_path, 8, signal.SIGKILL)
    (only_run(tmp_path) / "state.pt").write_bytes(b"not a checkpoint")
    run_posx(tmp_path, "train", *QUICK)
    assert_same_run(only_run(tmp_path), undisturbed)


def test_seeds_of_weights_and_data_are_apart(tmp_path: Path, undisturbed: Path) -> None:
    run_posx(tmp_path, "train", "-m", "seed=0,1", "data_seed=0,1", *QUICK, HERE)
    runs = sorted((tmp_path / "results" / "runs").glob("*/*/*"))
    assert len(runs) == 4
    configs = [config_of(run) for run in runs]
    weights = {load_file(run / "model.safetensors")["embedding"].numpy().tobytes() for run in runs}
    assert len(weights) == 4
    assert len({config.digest() for config in configs}) == 4
    assert len({config.group() for config in configs}) == 1
    task = make_task(configs[0])
    data = {
        (config.seed, config.data_seed): training_batch(config, task, 3)[0].tokens.numpy().tobytes()
        for config in configs
    }
    assert data[0, 0] == data[1, 0] != data[0, 1] == data[1, 1]


def test_device_and_threads_do_not_make_another_run(undisturbed: Path) -> None:
    from dataclasses import replace

    config = config_of(undisturbed)
    assert replace(config, device="cpu", threads=2).digest() == config.digest()
    assert replace(config, train_len=18).digest() != config.digest()


@pytest.mark.parametrize(
    ("lengths", "step", "expected"),
    [("fixed", 0, {6}), ("uniform", 0, {1, 2, 3, 4, 5, 6}), ("curriculum", 0, {1})],
)
def test_length_law(undisturbed: Path, lengths: str, step: int, expected: set[int]) -> None:
    from dataclasses import replace

    law = replace(config_of(undisturbed).train, lengths=lengths, curriculum_steps=100)
    random = torch.Generator().manual_seed(0)
    assert {draw_items(law, 6, step, random) for _ in range(200)} == expected


def test_curriculum_reaches_every_length(undisturbed: Path) -> None:
    from dataclasses import replace

    law = replace(config_of(undisturbed).train, lengths="curriculum", curriculum_steps=100)
    random = torch.Generator().manual_seed(0)
    assert {draw_items(law, 6, 100, random) for _ in range(200)} == {1, 2, 3, 4, 5, 6}
    assert max(draw_items(law, 30, 50, random) for _ in range(400)) == 18  # 60 % of 30


def test_learning_rate_warms_up_and_falls(undisturbed: Path) -> None:
    from dataclasses import replace

    config = config_of(undisturbed)
    config = replace(
        config,
        optim=replace(config.optim, warmup_steps=10),
        train=replace(config.train, decay_steps=4, max_steps=100),
    )
    assert rate(config, State(step=0)) == pytest.approx(0.1)
    assert rate(config, State(step=40)) == pytest.approx(0.6)  # a line to 0 at 100
    assert rate(config, State(step=40, steps_to_target=40)) == pytest.approx(0.6)
    assert rate(config, State(step=43, steps_to_target=40)) == pytest.approx(0.15)
    assert last_step(config.train, State(step=43, steps_to_target=40)) == 44
    assert last_step(config.train, State(step=43)) == 100
    assert last_step(config.train, State(step=98, steps_to_target=98)) == 100


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent")
    run_posx(folder, "train", "scheme=learned", *QUICK)
    return only_run(folder)


def continued(folder: Path, parent: Path, *words: str) -> Path:
    """The run that goes on from `parent` with the words, at 24 tokens unless they say otherwise."""
    run_posx(folder, "train", "scheme=learned", f"init={parent}", *QUICK, "train_len=24", *words)
    return only_run(folder)


def test_longer_training_of_a_run(tmp_path: Path, parent: Path) -> None:
    run = continued(tmp_path, parent)
    assert load_file(run / "model.safetensors")["schemes.0.table"].shape == (24, 16)
    assert record(run)["parent"] == str(parent)
    assert record(run)["label"].startswith("learned ")
    assert record(run)["label"].endswith("@16")
    run_posx(tmp_path, "eval", str(run), "--lengths", "24")


def test_extension_changes_the_trained_table_before_training_goes_on(
    tmp_path: Path, parent: Path
) -> None:
    """With a learning rate of 0 the weights are those that training started from."""
    rates = ("optim.lr=0", "optim.matrix_lr=0", "optim.weight_decay=0")
    run = continued(tmp_path, parent, "extension=interpolate", *rates)
    table = load_file(parent / "model.safetensors")["schemes.0.table"]
    trained = table[:14]  # 16 tokens: six symbols, 15 tokens, of which 14 are inputs
    expected = torch.nn.functional.interpolate(
        trained.T[None], size=24, mode="linear", align_corners=True
    )[0].T
    torch.testing.assert_close(load_file(run / "model.safetensors")["schemes.0.table"], expected)
    run_posx(tmp_path, "eval", str(run), "--lengths", "24")
    refused = run_posx(tmp_path, "eval", str(run), "--extend", "clip", "--lengths", "48", code=2)
    assert "was trained under extension=interpolate" in refused.stderr


def test_continued_runs_of_other_seeds_are_one_group(tmp_path: Path) -> None:
    run_posx(tmp_path, "train", "-m", "seed=0,1", *QUICK, HERE)
    parents = sorted((tmp_path / "results" / "runs").glob("*/*/*"))
    groups = set()
    for seed, start in enumerate(parents):
        words = (f"seed={seed}", f"init={start}", *QUICK, "train_len=24")
        run_posx(tmp_path, "train", *words)
    for run in (tmp_path / "results" / "runs").glob("*/*/*"):
        if run not in parents:
            groups.add(record(run)["group"])
    assert len(groups) == 1


def test_a_continued_run_never_sees_its_parents_batches(tmp_path: Path, parent: Path) -> None:
    run = continued(tmp_path, parent, "train_len=16")
    old, new = (config_of(each) for each in (parent, run))
    first, second = (
        training_batch(config, make_task(config), 3)[0].tokens for config in (old, new)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.n_layers=1"], "has another model or task"),
        (["task.vocab.digits=1"], "has another model or task"),
        (["init_len=16"], "init_len follows from init=RUN"),
    ],
)
def test_parents_that_do_not_fit_are_refused(
    words: list[str], sentence: str, tmp_path: Path, parent: Path
) -> None:
    given = ("train", "scheme=learned", f"init={parent}", *QUICK, "train_len=24", *words)
    assert sentence in run_posx(tmp_path, *given, code=2).stderr


def test_scheme_parameters_of_the_parent_are_not_lost_silently(posx: Posx, tmp_path: Path) -> None:
    posx("train", "scheme.base=500", *QUICK)
    words = ("train", f"init={only_run(tmp_path)}", *QUICK, "train_len=24")
    refused = posx(*words, code=2).stderr
    assert "has scheme.base=500.0, here it would be 10000.0: give scheme.base=..." in refused
    posx(*words, "scheme.base=500")
    posx(*words, "scheme.base=10000")  # said, so meant


def test_a_table_shorter_than_training_is_refused_before_the_start(
    posx: Posx, tmp_path: Path
) -> None:
    done = posx("train", "scheme=learned", "scheme.max_len=8", *QUICK, code=2)
    assert "max_len 8 is shorter than the 14 positions of train_len=16" in done.stderr
    assert not list((tmp_path / "results").rglob("run.json"))
    posx("train", "scheme=learned", *QUICK)
    assert "left out" not in posx("list", "run").stderr  # the refused one left no trace


def test_a_number_is_one_run_however_it_is_written(posx: Posx, tmp_path: Path) -> None:
    posx("train", "scheme.base=500", *QUICK)
    assert "already trained" in posx("train", "scheme.base=500.0", *QUICK).stderr


@pytest.mark.parametrize("name", ["model.safetensors", "train.csv", "run.json"])
def test_killed_between_the_last_writes(
    name: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written last before the end, the same command ends as if undisturbed."""
    write = runs.write_atomic
    finished = False

    def dying(path: Path, *arguments: Any) -> None:
        nonlocal finished
        finished |= path.name == "model.safetensors"
        if finished and path.name == name:
            raise KeyboardInterrupt
        write(path, *arguments)

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_atomic", dying)
        with pytest.raises(KeyboardInterrupt):
            sweep.run_jobs(list(QUICK))
    run_posx(tmp_path, "train", *QUICK)
    assert_same_run(only_run(tmp_path), undisturbed)
    assert {path.name for path in only_run(tmp_path).iterdir()} == {
        path.name for path in undisturbed.iterdir()
    }


def test_half_precision_keeps_its_weights_whole(posx: Posx, tmp_path: Path) -> None:
    """bfloat16 is for matrix products: a running mean of bfloat16 weights would stand still."""
    from posx import device

    if device.cpu_has_bfloat16():
        posx("train", "dtype=bfloat16", *QUICK)
        weights = load_file(only_run(tmp_path) / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        posx("eval", "--lengths", "24", "--sequences", "2")
    else:
        posx("train", "dtype=bfloat16", *QUICK, code=2)


def test_bfloat16_is_refused_where_the_cpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posx import device
    from posx.errors import UserError

    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: False)
    with pytest.raises(UserError, match="dtype=float32"):
        device.pick_dtype("bfloat16", "cpu")
    assert device.pick_dtype("float32", "cpu") is torch.float32


@pytest.mark.parametrize("name", ["bogus", "cuda:99", "mps"])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    from posx import device
    from posx.errors import UserError

    with pytest.raises(UserError, match=f"device={name}"):
        device.pick_device(name)
