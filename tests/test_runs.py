"""Files of a run are whole, readable by colleagues, and never lost to a full disk."""

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from posx.errors import UserError
from posx.runs import find, write_atomic, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def full_disk(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_mode_follows_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "run.json", "new")
        write_text(tmp_path / "run.json", "newer")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o666 & ~umask


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*No space left.*what was there is kept"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_a_writer_that_breaks_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_text(path, "old")

    def half(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("name", ["missing/x.csv", "file/x.csv", "folder", "x" * 300])
def test_a_path_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / name, "text")
    assert names(tmp_path) == ["file", "folder"]


def test_the_target_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "run.json"

    def look(file):
        file.write(b"new")
        file.flush()
        assert not path.exists()
        (other,) = names(tmp_path)
        assert other.startswith(".run.json.")

    write_atomic(path, look)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["run.json"]


def test_readers_never_see_half_a_file(tmp_path):
    path = tmp_path / "eval.csv"
    texts = ["a" * 100_000, "b" * 200_000]
    write_text(path, texts[0])
    writer = threading.Thread(
        target=lambda: [write_text(path, texts[number % 2]) for number in range(40)]
    )
    writer.start()
    seen = 0
    while writer.is_alive() or not seen:
        assert path.read_text() in texts
        seen += 1
    writer.join()


# 250 processes at once for 200 runs: each takes a run that nobody has, and adds rows.
JOBS = """
import os, sys
from pathlib import Path
from posx import runs
from posx.runs import EVAL_COLUMNS, IN_RECORD, Run
import filelock, pandas as pd

results = Path(sys.argv[1])

def job(seed):
    run = Run(runs.folder_of(results, "copy", "rope", seed, f"{seed:08x}"))
    with run.lock() as mine:
        if not mine or (run.folder / "run.json").exists():
            return
        record = dict.fromkeys(IN_RECORD) | {"schema": runs.SCHEMA, "seed": seed}
        run.write_config("seed: 0")
        run.write_record(record | {"status": "running"})
        for length in range(1, 6):
            row = dict.fromkeys(EVAL_COLUMNS, os.getpid())
            row |= {"seed": seed, "length": length, "computes": True}
            table = run.table("eval").to_dict("records")
            run.write_table("eval", pd.DataFrame([*table, row]))
        run.write_record(record | {"status": "finished"})

children = set()
for number in range(250):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job(number % 200)
            code = 0
        finally:
            os._exit(code)
    children.add(child)
failed = reads = 0
while children:
    for child in [*children]:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            children.remove(child)
            failed += status != 0
    found, problems = runs.find(results)  # a reader beside all the writers
    assert all("it has no run.json" in text for text in problems), problems
    for run in found:
        lengths = run.table("eval")["length"].tolist()
        assert lengths == [1, 2, 3, 4, 5][: len(lengths)]
        reads += 1
assert not failed, failed
assert reads
"""


@pytest.mark.slow
def test_200_jobs_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", JOBS, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, problems = find(tmp_path)
    assert not problems
    assert len(found) == 200
    for run in found:
        assert run.record()["status"] == "finished"
        table = run.table("eval")
        assert table["length"].tolist() == [1, 2, 3, 4, 5]
        assert table["scheme"].nunique() == 1  # written by one process from first to last
        assert set(names(run.folder)) == {".lock", "config.yaml", "eval.csv", "run.json"}
