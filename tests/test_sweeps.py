"""Sweeps survive: failing runs, killed workers, signals, other sweeps over the same runs."""

import json
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from conftest import HERE, QUICK, run_posx
from filelock import FileLock
from omegaconf import OmegaConf
from striking import jobs_of, run_of
from test_train import assert_same_run, record


def test_a_failing_run_stops_no_other(tmp_path: Path, strikers: str) -> None:
    words = ["train", strikers, "-m", "scheme=breaks,nope,rope", *QUICK, "model.d_head=7"]
    words.remove("model.d_head=8")
    done = run_posx(tmp_path, *words, code=1)
    *_, first, again, second, _, last = done.stderr.splitlines()
    assert first.startswith("posx: scheme=breaks: ")
    assert "ZeroDivisionError: of the test" in first
    assert again.split()[:4] == ["posx", "train", strikers, "scheme=breaks"]
    assert second.startswith("posx: scheme=rope: ")
    assert "even" in second  # the bad combination was found before any training
    assert last == "posx: 2 of 3 runs failed: scheme=breaks; scheme=rope"
    assert jobs_of(tmp_path)["state"].to_dict() == {
        "scheme=breaks": "failed",
        "scheme=nope": "finished",
        "scheme=rope": "refused",
    }
    assert record(run_of(tmp_path, "breaks"))["status"] == "failed"
    run_posx(tmp_path, *again.split()[1:])  # the command that the summary prints
    assert record(run_of(tmp_path, "breaks"))["status"] == "finished"


def test_a_killed_worker_is_replaced_and_its_run_goes_on(tmp_path: Path, strikers: str) -> None:
    words = ["train", strikers, "-m", "scheme=strikes,nope", *QUICK]
    done = run_posx(tmp_path, *words, "--jobs", "1")
    assert "scheme=strikes: its process was killed by SIGKILL" in done.stderr
    assert "tried again" in done.stderr
    assert "scheme=strikes: " in done.stderr.partition("goes on at step 3")[0]
    assert "2 runs: 2 finished" in done.stderr
    whole = tmp_path / "whole"
    whole.mkdir()
    run_posx(whole, "train", strikers, "scheme=strikes", *QUICK)  # its strike is spent
    assert_same_run(run_of(tmp_path, "strikes"), run_of(whole, "strikes"))


def test_a_run_that_is_lost_is_recorded(tmp_path: Path, strikers: str) -> None:
    words = ["train", strikers, "-m", "scheme=dies,leaves", *QUICK, "hydra.launcher.retries=0"]
    done = run_posx(tmp_path, *words, code=1)
    last = done.stderr.splitlines()[-1]
    assert last == "posx: 2 of 2 runs failed: scheme=dies; scheme=leaves"
    states = jobs_of(tmp_path)
    assert set(states["state"]) == {"lost"}
    assert "killed by SIGKILL" in states.loc["scheme=dies", "text"]
    assert "exit code 7" in states.loc["scheme=leaves", "text"]
    for scheme in ("dies", "leaves"):
        facts = record(run_of(tmp_path, scheme))
        assert facts["status"] == "lost"
        assert "its process" in facts["reason"]
    listed = run_posx(tmp_path, "list", "run", "status=lost").stdout
    assert listed.count("its process") == 2


def test_asked_to_stop_a_sweep_saves_and_goes_on(tmp_path: Path, strikers: str) -> None:
    words = ["train", strikers, "-m", "scheme=stops,nope", "seed=0,1", *QUICK, "--jobs", "1"]
    done = run_posx(tmp_path, *words, code=128 + signal.SIGTERM)
    last = "stopped by SIGTERM with 3 of 4 runs not begun; the same command goes on"
    assert done.stderr.splitlines()[-1] == f"posx: {last}"
    facts = record(run_of(tmp_path, "stops"))
    assert facts["status"] == "interrupted"
    assert 0 < facts["steps"] < 12
    assert not (tmp_path / "results" / "runs" / "copy" / "nope").exists()
    again = run_posx(tmp_path, *words)
    assert "goes on at step" in again.stderr
    assert "4 runs: 4 finished" in again.stderr


def test_workers_without_an_owner_save_and_leave(tmp_path: Path, strikers: str) -> None:
    words = [sys.executable, "-m", "posx", "train", strikers, "-m", "scheme=orphans", *QUICK]
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    with FileLock(run_of(tmp_path, "orphans") / ".lock", timeout=60):  # when the worker has left
        facts = record(run_of(tmp_path, "orphans"))
    assert facts["status"] == "interrupted"
    assert 0 < facts["steps"] < 12


def test_finished_runs_are_skipped(tmp_path: Path) -> None:
    run_posx(tmp_path, "train", "-m", "scheme=rope,nope", *QUICK, HERE)
    done = run_posx(tmp_path, "train", "-m", "scheme=rope,nope,alibi", *QUICK)  # one worker
    assert "3 runs: 2 there before, 1 finished" in done.stderr
    assert jobs_of(tmp_path)["state"].tolist() == ["there", "there", "finished"]
    assert "1/3" not in done.stderr  # nothing is said of those that were there
    assert "3/3  scheme=alibi: finished; " in done.stderr


def test_a_sweep_makes_the_same_runs_as_single_commands(tmp_path: Path) -> None:
    """Also the second run of a worker, which has trained another one before."""
    run_posx(tmp_path, "train", "-m", "scheme=alibi,rope", *QUICK, "--jobs", "1")
    whole = tmp_path / "whole"
    whole.mkdir()
    run_posx(whole, "train", "scheme=rope", *QUICK)
    assert_same_run(run_of(tmp_path, "rope"), run_of(whole, "rope"))


# -- two sweeps at once ----------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path, strikers: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A sweep in a process of its own whose run of `holds` is in training, and waits there."""
    for name in ("here", "go"):
        os.mkfifo(tmp_path / name)
    here = os.open(tmp_path / "here", os.O_RDONLY | os.O_NONBLOCK)
    words = [strikers, "-m", "scheme=holds", "seed=0", *QUICK]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "posx", "train", *words], cwd=tmp_path, stderr=said
        )
    try:
        assert select.select([here], [], [], 120)[0], "it did not come to train"
        yield process
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):  # nobody waits any more
            os.close(os.open(tmp_path / "go", os.O_WRONLY | os.O_NONBLOCK))
        os.close(here)


def test_two_sweeps_share_the_work(
    tmp_path: Path, strikers: str, other: "subprocess.Popen[bytes]"
) -> None:
    words = ["train", strikers, "-m", "scheme=holds,nope,releases", "seed=0", *QUICK]
    second = run_posx(tmp_path, *words, "--jobs", "1")
    assert other.wait() == 0
    assert "1/1  scheme=holds" in (tmp_path / "said").read_text()
    assert jobs_of(tmp_path)["state"].to_dict() == {
        "scheme=holds": "there",
        "scheme=nope": "finished",
        "scheme=releases": "finished",
    }
    assert "3 runs: 1 there before, 2 finished" in second.stderr


def test_a_dead_owner_holds_nothing(
    tmp_path: Path, strikers: str, other: "subprocess.Popen[bytes]"
) -> None:
    words = ["train", strikers, "-m", "scheme=holds,murders", "seed=0", *QUICK]
    second = run_posx(tmp_path, *words, "--jobs", "1")
    assert other.wait() == -signal.SIGKILL
    assert "scheme=holds: " in second.stderr
    assert "goes on at step 3" in second.stderr
    assert "2 runs: 2 finished" in second.stderr


# -- evaluation in the job -------------------------------------------------------------------------


def test_evaluation_is_part_of_the_job(tmp_path: Path) -> None:
    words = ["train", "-m", "scheme=rope,nope", *QUICK]
    run_posx(tmp_path, *words, "eval.lengths=[2x]", "eval.extensions=[yarn]")
    rope, nope = (pd.read_csv(run_of(tmp_path, name) / "eval.csv") for name in ("rope", "nope"))
    assert list(zip(rope["extension"], rope["length"], strict=True)) == [
        *(("none", 16), ("none", 32)),
        *(("yarn", 16), ("yarn", 32)),
    ]
    assert nope["extension"].tolist() == ["none", "none"]
    before = (run_of(tmp_path, "rope") / "train.csv").stat().st_mtime_ns
    done = run_posx(tmp_path, *words, "eval.lengths=[2x,64]", HERE)
    assert "2 runs: 2 there before" in done.stderr  # trained, but not evaluated at 64
    assert 64 in set(pd.read_csv(run_of(tmp_path, "rope") / "eval.csv")["length"])
    assert (run_of(tmp_path, "rope") / "train.csv").stat().st_mtime_ns == before


@pytest.mark.slow
def test_optuna_minimises_the_loss_in_range(tmp_path: Path) -> None:
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1"]
    words = ["train", "-m", *search, "optim.matrix_lr=interval(0.001,0.1)", *QUICK]
    with warnings.catch_warnings():  # of optuna 2, which the sweeper needs
        warnings.simplefilter("ignore")
        done = run_posx(tmp_path, *words)
    assert done.stderr.splitlines()[-1] == "4 runs: 4 finished"
    folder = tmp_path / "results"
    found = OmegaConf.load(max((folder / "sweeps").iterdir()) / "optimization_results.yaml")
    losses = {
        OmegaConf.load(run / "config.yaml").optim.matrix_lr: pd.read_csv(run / "train.csv")["loss"]
        for run in (folder / "runs" / "copy" / "rope").iterdir()
    }
    best = min(losses, key=lambda rate: losses[rate].iloc[-1])
    assert found.best_params["optim.matrix_lr"] == best
    assert found.best_value == losses[best].iloc[-1]


def test_a_single_run_is_evaluated_too(tmp_path: Path) -> None:
    done = run_posx(
        tmp_path, "train", *QUICK, "scheme=nope", "eval.lengths=24..48", "eval.extensions=[yarn]"
    )
    assert "extension yarn does not change nope" in done.stderr
    assert pd.read_csv(run_of(tmp_path, "nope") / "eval.csv")["length"].tolist() == [16, 24, 48]
    facts = json.loads((run_of(tmp_path, "nope") / "run.json").read_text())
    assert "eval" not in facts["label"]
