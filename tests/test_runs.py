"""Files of a run are whole, readable by colleagues, and never lost to a full disk."""

import errno
import os
import stat
import threading

import pytest

from posx.errors import UserError
from posx.runs import write_atomic, write_text


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
