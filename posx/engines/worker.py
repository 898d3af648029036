"""A worker process of a sweep: does one job after another, so that torch is imported once."""

import os
import signal
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from posx import progress


def serve(pipe: Connection) -> None:
    """Receive jobs until the other end closes; send progress, sentences and `Done`.

    Ctrl-C reaches all processes of a terminal: the one that owns the sweep tells the others by
    SIGTERM, on which a run in training is saved.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from posx import job  # imports torch, while the first job is still being prepared
    from posx.engines import Done

    progress.divert(partial(_send, pipe))
    while True:
        try:
            given = pipe.recv()
        except (EOFError, OSError):
            return
        _send(pipe, Done(job.carry_out(given)))


def _send(pipe: Connection, message: Any) -> None:
    """Where the owner of the sweep is gone, this process stops as if it had been asked to."""
    try:
        pipe.send(message)
    except OSError:
        os.kill(os.getpid(), signal.SIGTERM)
