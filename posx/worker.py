"""A worker process of a sweep: does one job after another, so that torch is imported once."""

import os
import signal
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from posx import progress

if TYPE_CHECKING:
    from posx.job import Outcome


@dataclass(frozen=True)
class Done:
    """The job that the worker was given has ended; None where another process was at it."""

    outcome: "Outcome | None"


def serve(pipe: Connection) -> None:
    """Receive jobs until the other end closes; send progress, sentences and `Done`.

    Ctrl-C reaches all processes of a terminal: the one that owns the sweep tells the others by
    SIGTERM, on which a run in training is saved.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from posx import job  # imports torch, while the first job is still being prepared

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
