"""Disks that fill up or turn read-only, clocks that run backwards, files that are damaged: the same
command completes or says what to do, and nothing finished is lost. `scripts/faults` does the kills.
"""

import errno
import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, run_posx
from test_train import Strike
from typer.testing import Result

from posx import train
from posx.runs import Run

READINGS = ["seconds", "tokens_per_s", "peak_mb"]  # of the clock and of memory: never the same
EVAL = ["eval", "--lengths", "16,24", "--sequences", "4"]
REPORT = ["report", "--metric", "loss", "--format", "csv", "--output", "report.csv"]
STUDY = [["train", "scheme=rope", *QUICK], ["train", "scheme=learned", *QUICK], EVAL, REPORT]


def run_of(folder: Path, scheme: str) -> Path:
    (found,) = (folder / "results" / "runs" / "copy" / scheme).iterdir()
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """All that is finished: weights and report byte for byte, tables without readings of the clock
    and of memory."""
    found: dict[str, Any] = {}
    for path in (folder / "results" / "runs").glob("*/*/seed*"):
        run, scheme = Run(path), path.parent.name
        if (path / "run.json").exists() and run.record()["status"] == "finished":
            found[f"weights of {scheme}"] = (path / "model.safetensors").read_bytes()
            for name in ("train", "eval"):
                if (path / f"{name}.csv").exists():
                    table = run.table(name).drop(columns=READINGS, errors="ignore")
                    found[f"{name}.csv of {scheme}"] = table.to_csv(index=False)
    if (folder / "report.csv").exists():
        found["report"] = (folder / "report.csv").read_bytes()
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    for words in STUDY:
        run_posx(folder, *words)
    return folder


def copied(calm: Path, folder: Path, *ignored: str) -> None:
    shutil.copytree(
        calm / "results", folder / "results", ignore=shutil.ignore_patterns(*ignored, "sweeps")
    )


def one_sentence(done: Result) -> str:
    """What a command that could not go on said."""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("posx: ")
    assert "Traceback" not in done.stderr
    return last


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kills() -> None:
    script = Path(__file__).parent.parent / "scripts" / "faults"
    command = [sys.executable, str(script), "--seed", "3", "--kills", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing finished is lost") == 8


# -- disks -----------------------------------------------------------------------------------------


class Disk:
    """Counts what is asked of the disk; from one request on, all fail."""

    def __init__(self, number: int, good: int | None) -> None:
        self.number, self.left = number, good

    def ask(self, path: object) -> None:
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number), str(path))
        if self.left is not None:
            self.left -= 1


NOT_YET = {"train": {"eval.csv of rope", "report"}, "eval": {"report"}, "report": set()}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def failing(number: int, good: int) -> Iterator[Disk]:
    """A disk on which `good` requests to write go well and then none: on a full one data cannot be
    flushed; on a read-only one no file can be opened to write, renamed or removed."""
    disk = Disk(number, good)
    with pytest.MonkeyPatch.context() as patch:

        def guard(owner: object, name: str, writes: Callable[..., bool] = lambda *_: True) -> None:
            call = getattr(owner, name)

            def guarded(*arguments: Any, **named: Any) -> Any:
                if writes(*arguments):
                    disk.ask(arguments[0])
                return call(*arguments, **named)

            patch.setattr(owner, name, guarded)

        if number == errno.ENOSPC:
            guard(os, "fsync")
        else:
            guard(os, "open", lambda _, flags, *__: bool(flags & WRITES))
            guard(Path, "open", lambda _, mode="r", *__: mode[0] in "wxa")
            for name in ("replace", "unlink"):
                guard(Path, name)
        yield disk


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read_only"])
@pytest.mark.parametrize("words", [STUDY[0], EVAL, REPORT], ids=["train", "eval", "report"])
def test_a_disk_that_fails_at_each_write(
    words: list[str], number: int, calm: Path, tmp_path: Path
) -> None:
    for good in itertools.count():
        folder = tmp_path / str(good)
        copied(calm, folder, *{"train": ["rope"], "eval": ["eval.csv"], "report": []}[words[0]])
        before = outcome(folder)
        with failing(number, good) as disk:
            done = run_posx(folder, *words, code=None)
        assert before.items() <= outcome(folder).items()
        if done.exit_code:
            one_sentence(done)
            assert os.strerror(number) in done.stderr
        run_posx(folder, *words)
        now, expected = outcome(folder), outcome(calm)
        assert now.items() <= expected.items()
        assert expected.keys() - now.keys() == NOT_YET[words[0]]
        assert not [path for path in folder.rglob("results/**/.*") if path.name != ".lock"]
        if disk.left:  # the command did not need the last good request
            break
    assert good > 1


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tick", [0.0, -1.0], ids=["stands", "runs_backwards"])
def test_clocks_that_do_not_go_forwards(
    tick: float, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "perf_counter", "process_time", "monotonic"):
        readings = itertools.count(1e9, tick)
        monkeypatch.setattr(time, name, lambda readings=readings: next(readings))
    for words in STUDY:
        run_posx(tmp_path, *words)
    assert outcome(tmp_path) == outcome(calm)


# -- damaged and foreign files ---------------------------------------------------------------------


def empty(data: bytes) -> bytes:
    return b""


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def noise(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data) + 1)


DAMAGES = [empty, half, noise]
FILES = ["config.yaml", "run.json", "train.csv", "eval.csv", "model.safetensors", ".lock"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_to_a_finished_run(
    name: str, damage: Callable[[bytes], bytes], calm: Path, tmp_path: Path
) -> None:
    """A command completes or says what to do; who does as it says ends with what was there."""
    copied(calm, tmp_path)
    rope, learned = (run_of(tmp_path, scheme) for scheme in ("rope", "learned"))
    (rope / name).write_bytes(damage((rope / name).read_bytes()))
    others = {path: path.read_bytes() for path in learned.iterdir() if path.name != ".lock"}
    for words in [["show", str(rope)], [*EVAL, str(rope), "--again"]]:
        done = run_posx(tmp_path, *words, code=None)
        if done.exit_code:
            said = one_sentence(done)
            assert str(rope) in said
            if "move the folder away" in said:
                shutil.move(rope, tmp_path / "away")
                break
            assert "delete it" in said
            (rope / name).unlink()
            run_posx(tmp_path, *words)
    for words in STUDY:
        run_posx(tmp_path, *words)
    assert all(path.read_bytes() == data for path, data in others.items())
    assert outcome(tmp_path) == outcome(calm)


def other_run(data: bytes) -> bytes:
    """The state of another program, which torch can read."""
    file = io.BytesIO()
    torch.save({"model": {}}, file)
    return file.getvalue()


def one_bit(data: bytes) -> bytes:
    """In the middle of a tensor, where only a checksum can tell."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["config.yaml", "run.json", "train.csv", "state.pt"], DAMAGES),
        *(("state.pt", damage) for damage in (other_run, one_bit)),
    ],
)
def test_damage_to_an_unfinished_run(
    name: str, damage: Callable[[bytes], bytes], calm: Path, tmp_path: Path
) -> None:
    copied(calm, tmp_path, "rope")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_step", Strike(5, signal.SIGTERM))
        run_posx(tmp_path, *STUDY[0], code=128 + signal.SIGTERM)
    rope = run_of(tmp_path, "rope")
    (rope / name).write_bytes(damage((rope / name).read_bytes()))
    done = run_posx(tmp_path, *STUDY[0], code=None)
    if done.exit_code:
        said = one_sentence(done)
        assert str(rope) in said
        if "move the folder away" in said:
            shutil.move(rope, tmp_path / "away")
        else:
            assert "delete it" in said
            (rope / name).unlink()
    for words in STUDY:
        run_posx(tmp_path, *words)
    assert outcome(tmp_path) == outcome(calm)


def test_files_of_others_among_the_runs(calm: Path, tmp_path: Path) -> None:
    copied(calm, tmp_path)
    runs = tmp_path / "results" / "runs"
    for name in ("notes", "copy/notes", "copy/rope/seed_notes.txt", "copy/rope/.seed"):
        (runs / name).write_text("mine")
    (runs / "copy" / "rope" / "seed_mine").mkdir()
    (runs / "copy" / "rope" / "seed_mine" / "notes.txt").write_text("mine")
    (runs / "copy" / "rope" / "seed_mine" / "run.json").mkdir()
    (runs / "copy" / "nope").symlink_to(tmp_path / "nowhere")
    for words in [["list", "run"], EVAL, REPORT]:
        said = run_posx(tmp_path, *words).stderr
        assert said.count("left out") == 1, said
        assert "seed_mine/run.json cannot be read" in said
    assert (tmp_path / "report.csv").read_bytes() == (calm / "report.csv").read_bytes()


def test_a_lock_that_cannot_be_made(calm: Path, tmp_path: Path) -> None:
    copied(calm, tmp_path, ".lock")
    (run_of(tmp_path, "rope") / ".lock").mkdir()
    done = run_posx(tmp_path, *STUDY[0], code=2)
    assert f"cannot lock {run_of(tmp_path, 'rope')}/.lock" in one_sentence(done)
