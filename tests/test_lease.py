"""A second machine with locks of its own: it leaves a live owner alone and follows a dead one."""

import os
import platform

import pytest

from posx import lease
from posx.runs import Run, find


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(lease, "EXPIRY_S", 2.0)


@pytest.fixture
def elsewhere(monkeypatch):
    """From here on, this is another machine."""
    return lambda: monkeypatch.setattr(platform, "node", lambda: "elsewhere")


def leases(folder):
    return sorted(path.name for path in folder.glob(".lease.*"))


def test_a_live_owner_is_left_alone(tmp_path, elsewhere):
    with lease.hold(tmp_path) as first:
        elsewhere()
        with lease.hold(tmp_path) as second:
            assert (first, second) == (True, False)
    assert not leases(tmp_path)
    with lease.hold(tmp_path) as third:
        assert third


def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lease.time, "sleep", lambda _: pytest.fail("it waits"))
    (tmp_path / ".lease.1").write_text(f"{platform.node()} 1\n")
    with lease.hold(tmp_path) as mine:
        assert mine
        assert leases(tmp_path) == [".lease.2"]


@pytest.mark.parametrize("text", ["elsewhere 1\n", ""])
def test_an_expired_lease_is_taken_at_once(tmp_path, monkeypatch, text):
    monkeypatch.setattr(lease.time, "sleep", lambda _: pytest.fail("it waits"))
    (tmp_path / ".lease.9").write_text(text)
    os.utime(tmp_path / ".lease.9", (1e9, 1e9))
    with lease.hold(tmp_path) as mine:
        assert mine
        assert leases(tmp_path) == [".lease.10"]


def test_an_owner_that_died_a_moment_ago_or_in_the_future_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRY_S", 0.05)
    (tmp_path / ".lease.1").write_text("elsewhere 1\n")
    os.utime(tmp_path / ".lease.1", (1e11, 1e11))
    with lease.hold(tmp_path) as mine:
        assert mine


def test_only_one_takes_an_expired_lease(tmp_path, monkeypatch):
    (tmp_path / ".lease.1").write_text("elsewhere 1\n")

    def faster(_):
        (tmp_path / ".lease.2").write_text("third 1\n")
        return True

    monkeypatch.setattr(lease, "_is_dead", faster)
    with lease.hold(tmp_path) as mine:
        assert not mine
    assert leases(tmp_path) == [".lease.1", ".lease.2"]


def test_a_run_is_under_lock_and_lease(tmp_path, elsewhere):
    run = Run(tmp_path / "run")
    with run.lock() as first:
        (run.folder / ".lock").unlink()  # the lock of the other machine does not reach here
        elsewhere()
        with run.lock() as second:
            assert (first, second) == (True, False)
    assert not leases(run.folder)


def test_a_run_killed_before_its_first_file_is_no_run(tmp_path):
    folder = tmp_path / "runs" / "copy" / "rope" / "seed0-1"
    folder.mkdir(parents=True)
    for name in (".lock", ".lease.3"):
        (folder / name).touch()
    assert find(tmp_path) == ({}, [])
