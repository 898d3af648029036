"""Sweeps on real engines: `bash scripts/cluster .venv/bin/pytest -m cluster` starts them."""

import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest
from conftest import QUICK, run_posx
from striking import jobs_of, run_of
from test_train import assert_same_run, record

from posx.engines import Begun, Done, Lost
from posx.engines.remote import RemoteEngine
from posx.errors import UserError
from posx.job import Job, Outcome
from posx.pool import Pool

cluster = pytest.mark.cluster
SLURM = ["hydra/launcher=slurm", "hydra.launcher.time=5", "hydra.launcher.mem=null"]
ENGINES = {"slurm": SLURM, "ray": ["hydra/launcher=ray"]}


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> list[str]:
    """The words that choose an engine, which must run."""
    variable = {"slurm": "SLURM_CONF", "ray": "RAY_ADDRESS"}[request.param]
    if variable not in os.environ:
        pytest.fail("no cluster: bash scripts/cluster .venv/bin/pytest -m cluster")
    return ENGINES[request.param]


on = pytest.mark.parametrize("engine", list(ENGINES), indirect=True)
on_slurm = pytest.mark.parametrize("engine", ["slurm"], indirect=True)


def assert_as_undisturbed(folder: Path, strikers: str, scheme: str) -> None:
    """The run of a scheme whose strikes are spent is what a run without any is."""
    whole = folder / "whole"
    whole.mkdir()
    run_posx(whole, "train", strikers, f"scheme={scheme}", *QUICK)
    assert_same_run(run_of(folder, scheme), run_of(whole, scheme))


@cluster
@on
def test_a_grid_is_trained_and_evaluated_once(tmp_path: Path, engine: list[str]) -> None:
    words = ["train", "-m", "scheme=rope,nope,alibi", "eval.lengths=[16,24]", *QUICK, *engine]
    done = run_posx(tmp_path, *words, "hydra.launcher.jobs=2")
    assert done.stderr.splitlines()[-1] == "3 runs: 3 finished"
    rows = pd.read_csv(run_of(tmp_path, "alibi") / "eval.csv")
    assert rows["length"].tolist() == [16, 24]
    again = run_posx(tmp_path, *words)
    assert again.stderr.splitlines()[-1] == "3 runs: 3 there before"


@cluster
@on
def test_a_killed_job_is_tried_again_or_lost(
    tmp_path: Path, strikers: str, engine: list[str]
) -> None:
    words = ["train", strikers, "-m", "scheme=strikes,dies,breaks,nope", *QUICK, *engine]
    done = run_posx(tmp_path, *words, code=1)
    assert re.search(r"^scheme=strikes: .*; it is tried again$", done.stderr, re.MULTILINE)
    assert jobs_of(tmp_path)["state"].to_dict() == {
        "scheme=strikes": "finished",
        "scheme=dies": "lost",
        "scheme=breaks": "failed",
        "scheme=nope": "finished",
    }
    assert record(run_of(tmp_path, "dies"))["status"] == "lost"
    assert_as_undisturbed(tmp_path, strikers, "strikes")


@cluster
@on_slurm
@pytest.mark.parametrize("scheme", ["warned", "bumped"])
def test_a_job_that_must_give_way_goes_on_later(
    tmp_path: Path, strikers: str, engine: list[str], scheme: str
) -> None:
    words = ["train", strikers, "-m", f"scheme={scheme},nope", *QUICK, *engine]
    done = run_posx(tmp_path, *words)
    assert re.search(rf"^scheme={scheme}: \S+: goes on at step \d+$", done.stderr, re.MULTILINE)
    assert "2 runs: 2 finished" in done.stderr
    assert "tried again" not in done.stderr  # Slurm had it in its queue
    assert_as_undisturbed(tmp_path, strikers, scheme)


@cluster
@on_slurm
def test_what_slurm_refuses_is_told(tmp_path: Path, engine: list[str]) -> None:
    words = ["train", "-m", "scheme=rope,nope", *QUICK, *engine]
    done = run_posx(tmp_path, *words, "hydra.launcher.partition=nowhere", code=2)
    (line,) = done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    assert line.startswith("posx: sbatch refuses: ")
    assert "partition" in line
    done = run_posx(tmp_path, *words, "hydra.launcher.jobs=0", code=2)
    assert done.stderr == "posx: hydra.launcher.jobs=0: must be at least 1\n"


# -- without a cluster -----------------------------------------------------------------------------


def test_without_slurm_there_is_one_line(tmp_path: Path) -> None:
    words = ["train", "-m", "scheme=rope,nope", *QUICK, "hydra/launcher=slurm"]
    done = run_posx(tmp_path, *words, code=2, PATH="")
    assert done.stderr.startswith("posx: hydra/launcher=slurm: no sbatch here")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("hydra.launcher.address=127.0.0.1:9", "no cluster answers at 127.0.0.1:9"),
        ("hydra.launcher.num_cpus=-1", "num_cpus cannot be negative"),
    ],
)
def test_a_wrong_ray_is_told_at_once(tmp_path: Path, word: str, told: str) -> None:
    words = ["train", "-m", "scheme=rope,nope", *QUICK, "hydra/launcher=ray", word]
    done = run_posx(tmp_path, *words, code=2)
    assert done.stderr.startswith("posx: hydra/launcher=ray: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


class IdleEngine(RemoteEngine):
    """Nobody does the jobs; they end as the test says."""

    closed = False

    def __init__(self, jobs, folder):
        super().__init__(jobs, folder)
        self.ends: dict[int, Done | Lost] = {}

    def send(self, jobs):
        return dict.fromkeys(jobs, "handle")

    def ended(self):
        return self.ends

    def stop(self, kill):
        self.ends = {number: Lost("stopped") for number in self.handles}

    def close(self):
        self.closed = True


class Refuses(IdleEngine):
    """Takes one job at a time, and refuses the second one once."""

    sent: tuple[int, ...] = ()

    def send(self, jobs):
        self.sent += (*jobs,)
        if self.sent == (0, 1):
            raise UserError("the queue is full")
        self.ends |= {number: Done(Outcome("finished", "well")) for number in jobs}
        return dict.fromkeys(jobs, "handle")

    def room(self):
        return 1

    def ended(self):
        ends, self.ends = self.ends, {}
        return ends


def test_a_full_queue_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posx.engines.remote.READ_EVERY_S", 0)
    monkeypatch.setattr("posx.pool.TICK_S", 0)
    engine = Refuses(None, tmp_path / "jobs")
    pool = Pool(["a", "b", "c"], lambda number: Job(None, None, None, "", None, ()), engine, 0)
    said: list[str] = []
    monkeypatch.setattr(pool.board, "say", said.append)
    monkeypatch.setattr(pool, "_keep", lambda path: None)  # the jobs have no runs
    pool.run(tmp_path / "jobs.csv")
    assert engine.sent == (0, 1, 1, 2)
    assert engine.closed
    assert "posx: the queue is full" in said
    assert {each.state for each in pool.outcomes.values()} == {"finished"}


def test_a_diary_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posx.engines.remote.READ_EVERY_S", 0)
    engine = IdleEngine(3, tmp_path)
    engine.submit({0: None, 4: None})
    assert engine.room() == 1
    step = {"doing": "trains", "done": 3, "total": 9, "facts": {"loss": "0.5"}}
    with engine.diary(4).open("w") as file:
        file.write('{}\n"a sentence"\n{"half a\n' + json.dumps(step)[:20])
        file.flush()
        assert list(engine.listen(0)) == [(4, Begun()), (4, "a sentence")]
        file.write(json.dumps(step)[20:] + "\n")
    ((number, heard),) = engine.listen(0)
    assert (number, heard.done, heard.facts) == (4, 3, {"loss": "0.5"})
    outcome = Outcome("finished", "well")
    engine.ends = {0: Done(Outcome("stopped", "by somebody", code=143)), 4: Done(outcome)}
    assert list(engine.listen(0)) == [(0, Lost("by somebody")), (4, Done(outcome))]
    assert engine.room() == 3
