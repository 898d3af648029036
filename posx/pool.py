"""The jobs of a sweep on worker processes of this machine.

Jobs are prepared one at a time, when a worker is free for them. A worker that dies takes its job
with it and nothing else; a run that another process works on is looked at again at the end, when
it is finished or its owner is gone.
"""

import csv
import io
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from posx import job, runs
from posx.board import Board
from posx.errors import UserError
from posx.job import Job, Outcome
from posx.progress import Step
from posx.train import stop_signals
from posx.worker import Done, serve

TICK_S = 0.5  # between looks at the clock
LOOK_AGAIN_S = 2.0  # between looks at a run that another process works on


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """One process, and the number of the job that it is at."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        before = signal.getsignal(signal.SIGINT)
        try:  # the child starts deaf to ctrl-C, and stays so
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.process.start()
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)
        other.close()
        self.number: int | None = None

    def give(self, number: int, given: Job) -> None:
        self.number = number
        with suppress(OSError):  # it died: the end of its pipe says so, too
            self.pipe.send(given)

    def death(self) -> str:
        """Wait for its end; how it ended, as a sentence."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with exit code {code}"
        name = signal.Signals(-code).name
        memory = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
        return f"its process was killed by {name}{memory}"

    def end(self) -> None:
        """An idle worker leaves when its pipe closes."""
        self.pipe.close()
        self.process.join()


class Pool:
    """Does the jobs 0, 1, ... of a sweep; `prepare(number)` makes one, or says what became of it
    already."""

    def __init__(
        self,
        names: Sequence[str],
        prepare: Callable[[int], Job | Outcome],
        workers: int | None,
        retries: int,
    ) -> None:
        if workers is not None and workers < 1:
            raise UserError(f"hydra.launcher.jobs={workers}: must be at least 1")
        if retries < 0:
            raise UserError(f"hydra.launcher.retries={retries}: must be at least 0")
        self.names, self.prepare, self.retries = names, prepare, retries
        self.size = min(workers or usable_cores(), len(names))
        self.outcomes: dict[int, Outcome] = {}
        self.jobs: dict[int, Job] = {}
        self.waiting = deque(range(len(names)))
        self.elsewhere: dict[int, float] = {}  # job -> when to look again
        self.tried: dict[int, int] = {}  # job -> how often it was lost
        self.workers: list[Worker] = []
        self.board = Board(names, self.size)
        self.kept = 0  # outcomes that are written
        self.signals: list[int] = []  # that asked to stop

    def run(self, path: Path) -> None:
        """Until all is done or a signal asks to stop; the csv file `path` keeps what became of each
        job."""
        told = 0
        with stop_signals() as self.signals, self.board:
            try:
                while True:
                    if len(self.signals) > told:
                        told = len(self.signals)
                        self._stop(kill=told > 1)
                    if not self.signals:
                        self._hand_out()
                    busy = [worker for worker in self.workers if worker.number is not None]
                    if not busy and (self.signals or not (self.waiting or self.elsewhere)):
                        break
                    self._listen(busy)
                    self._keep(path)
            finally:
                for worker in self.workers:
                    worker.process.terminate()
                    worker.end()
        self._keep(path)

    # -- giving ------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give every idle worker a job, and make workers while there are too few."""
        while not self.signals:
            idle = [worker for worker in self.workers if worker.number is None]
            if not idle and len(self.workers) == self.size:
                return
            number = self._next()
            if number is None:
                return
            if not idle:
                self.workers.append(worker := Worker())
                idle = [worker]
            idle[0].give(number, self.jobs[number])
            self.board.starts(number)

    def _next(self) -> int | None:
        """The next job that there is work on."""
        while self.waiting and not self.signals:
            number = self.waiting.popleft()
            if number not in self.jobs:
                prepared = self.prepare(number)
                if isinstance(prepared, Outcome):
                    self._ended(number, prepared)
                    continue
                self.jobs[number] = prepared
            return number
        now = time.monotonic()
        for number in [number for number, when in self.elsewhere.items() if when <= now]:
            self.elsewhere[number] = now + LOOK_AGAIN_S
            with self.jobs[number].run.lock() as free:
                there = job.there(self.jobs[number]) if free else None
            if free:
                del self.elsewhere[number]
                if there is None:
                    return number
                self._ended(number, there)
        return None

    # -- hearing -----------------------------------------------------------------------------------

    def _listen(self, busy: list[Worker]) -> None:
        """Take what workers send, for a moment at most."""
        pipes = {worker.pipe: worker for worker in busy}
        for pipe in wait(list(pipes), TICK_S):
            worker = pipes[pipe]  # ty: ignore[invalid-argument-type]
            try:
                while worker.pipe.poll():
                    self._hear(worker, worker.pipe.recv())
            except (EOFError, OSError):
                self._died(worker)
        self.board.tick()

    def _hear(self, worker: Worker, message: Step | str | Done) -> None:
        number = worker.number
        if number is None:
            return
        if isinstance(message, Step):
            self.board.goes_on(number, message)
        elif isinstance(message, str):
            self.board.say(f"{self.names[number]}: {message}")
        else:
            worker.number = None
            if message.outcome is None:
                self.elsewhere[number] = time.monotonic() + LOOK_AGAIN_S
                self.board.waits(number, "elsewhere")
            else:
                self._ended(number, message.outcome)

    def _died(self, worker: Worker) -> None:
        """A worker is gone: its job is tried again, or recorded as lost."""
        reason, number = worker.death(), worker.number
        self.workers.remove(worker)
        if number is None:
            return
        given = self.jobs[number]
        if self.signals:
            self._mark(given, "interrupted", "stopped")
            text = f"stopped by {signal.Signals(self.signals[0]).name}; the same command goes on"
            self._ended(number, Outcome("stopped", text, code=job.SIGNALLED + self.signals[0]))
            return
        self.tried[number] = self.tried.get(number, 0) + 1
        if self.tried[number] <= self.retries:
            self.board.say(f"{self.names[number]}: {reason}; it is tried again")
            self.board.waits(number, "waits")
            self.waiting.appendleft(number)
            return
        self._mark(given, "lost", reason)
        times = f" ({self.tried[number]} times)" if self.tried[number] > 1 else ""
        self._ended(number, Outcome("lost", f"{reason}{times}", code=1))

    def _mark(self, given: Job, status: str, reason: str) -> None:
        with given.run.lock() as mine, suppress(UserError):
            if mine:
                job.mark(given.run, status, reason)

    def _stop(self, kill: bool) -> None:
        """Ask the workers to save and stop; the second time, end them."""
        for worker in self.workers:
            worker.process.kill() if kill else worker.process.terminate()
        if not kill:
            self.board.say("stopping: runs in training are saved")

    # -- keeping -----------------------------------------------------------------------------------

    def _ended(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        self.board.ended(number, outcome)

    def _keep(self, path: Path) -> None:
        """Write what became of each job so far."""
        if len(self.outcomes) == self.kept:
            return
        self.kept = len(self.outcomes)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", "state", "text", "folder"])
        for number, outcome in sorted(self.outcomes.items()):
            where = self.jobs[number].run.folder if number in self.jobs else ""
            writer.writerow([self.names[number], outcome.state, outcome.text, where])
        runs.write_text(path, text.getvalue())
