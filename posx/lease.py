"""Who works on a folder, on file systems whose kernel locks end at the machine.

Beside the lock lies `.lease.<n>`, a file that its owner touches every HEARTBEAT_S seconds and
removes in the end. It is another machine's to take when it is older than EXPIRY_S by the file
system's own clock, or was watched for EXPIRY_S without being touched, so that a dead owner holds
nothing for longer. Taking it is creating number n + 1, which only one can. Should an owner that
hung for longer wake up, two processes write the same run: each file is still whole, and both are
of the same training.
"""

import os
import platform
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from posx.errors import UserError

HEARTBEAT_S = 10.0
EXPIRY_S = 60.0


@contextmanager
def hold(folder: Path) -> Generator[bool]:
    """Whether the lease of `folder` is this process's; only under the lock of this machine, which
    tells that no other process of it is at work.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        mine = _take(folder)
    except OSError as error:
        raise UserError(f"cannot write a lease in {folder} ({error.strerror})") from None
    if mine is None:
        yield False
        return
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(mine, over), daemon=True)
    heart.start()
    try:
        yield True
    finally:
        over.set()
        heart.join()
        with suppress(OSError):  # it expires
            mine.unlink()


def _take(folder: Path) -> Path | None:
    """The lease of this process, or None where another machine's owner lives."""
    found = sorted(folder.glob(".lease.*"), key=_number)
    if found and not _is_dead(found[-1]):
        return None
    mine = folder / f".lease.{_number(found[-1]) + 1 if found else 1}"
    try:
        with mine.open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}\n")
    except FileExistsError:
        return None  # somebody was faster
    for old in found:
        old.unlink(missing_ok=True)
    return mine


def _is_dead(lease: Path) -> bool:
    """Whether a lease has no owner any more; watches one of another machine until that is known."""
    try:
        if lease.read_text(errors="replace").partition(" ")[0] == platform.node():
            return True  # it would hold the lock
        seen = lease.stat().st_mtime_ns
        with tempfile.NamedTemporaryFile(dir=lease.parent) as now:
            if os.fstat(now.fileno()).st_mtime_ns - seen > EXPIRY_S * 1e9:
                return True
        started = time.monotonic()
        while time.monotonic() - started <= EXPIRY_S:
            time.sleep(HEARTBEAT_S / 10)
            if lease.stat().st_mtime_ns != seen:
                return False
    except FileNotFoundError:
        pass  # its owner is through
    return True


def _beat(lease: Path, over: threading.Event) -> None:
    while not over.wait(HEARTBEAT_S):
        with suppress(OSError):  # a disk that is away for a moment
            os.utime(lease)


def _number(lease: Path) -> int:
    text = lease.suffix[1:]
    return int(text) if text.isdecimal() else 0
