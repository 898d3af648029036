"""The jobs of a sweep on an engine, and the books of it.

Jobs are prepared when the engine has room for them. One whose process is gone is tried again, or
recorded as lost; a run that another process works on is looked at again at the end, when it is
finished or its owner is gone.
"""

import csv
import io
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from posx import job, runs
from posx.board import Board
from posx.engines import Begun, Engine, Lost, Message
from posx.errors import UserError
from posx.job import Job, Outcome
from posx.progress import Step
from posx.train import stop_signals

TICK_S = 0.5  # between looks at the clock
LOOK_AGAIN_S = 2.0  # between looks at a run that another process works on


class Pool:
    """Does the jobs 0, 1, ... of a sweep; `prepare(number)` makes one, or says what became of it
    already."""

    def __init__(
        self,
        names: Sequence[str],
        prepare: Callable[[int], Job | Outcome],
        engine: Engine,
        retries: int,
    ) -> None:
        if retries < 0:
            raise UserError(f"hydra.launcher.retries={retries}: must be at least 0")
        self.names, self.prepare, self.engine, self.retries = names, prepare, engine, retries
        self.outcomes: dict[int, Outcome] = {}
        self.jobs: dict[int, Job] = {}
        self.waiting = deque(range(len(names)))
        self.elsewhere: dict[int, float] = {}  # job -> when to look again
        self.tried: dict[int, int] = {}  # job -> how often it was lost
        self.given: set[int] = set()  # jobs that the engine has
        self.refused = False  # it took no more
        self.board = Board(names, min(engine.size, len(names)))
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
                        self.engine.stop(kill=told > 0)
                        if not told:
                            self.board.say("stopping: runs in training are saved")
                        told = len(self.signals)
                    if not self.signals:
                        self._hand_out()
                    if not self.given and (self.signals or not (self.waiting or self.elsewhere)):
                        break
                    for number, message in self.engine.listen(TICK_S):
                        self._hear(number, message)
                    self.board.tick()
                    self._keep(path)
            finally:
                self.engine.close()
        self._keep(path)

    # -- giving ------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give the engine as many jobs as it takes."""
        while not self.refused and (room := self.engine.room()):
            batch: dict[int, Job] = {}
            while len(batch) < room and (number := self._next()) is not None:
                batch[number] = self.jobs[number]
            if not batch or self.signals:
                self.waiting.extendleft(reversed(batch))
                return
            try:
                self.engine.submit(batch)
            except UserError as error:
                if not self.given and not self.signals:
                    raise
                # What it has goes on; it is asked again when one of these jobs has ended.
                self.refused = True
                self.board.say(f"posx: {error}")
                self.waiting.extendleft(reversed(batch))
                return
            self.given |= batch.keys()
            for number in batch:
                self.board.waits(number, "queued")

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

    def _hear(self, number: int, message: Message) -> None:
        if isinstance(message, Begun):
            self.board.starts(number)
        elif isinstance(message, Step):
            self.board.goes_on(number, message)
        elif isinstance(message, str):
            self.board.say(f"{self.names[number]}: {message}")
        else:
            self.given.remove(number)
            self.refused = False
            if isinstance(message, Lost):
                self._lost(number, message.reason)
            elif message.outcome is not None:
                self._ended(number, message.outcome)
            else:
                self.elsewhere[number] = time.monotonic() + LOOK_AGAIN_S
                self.board.waits(number, "elsewhere")

    def _lost(self, number: int, reason: str) -> None:
        """Its process is gone: the job is tried again, or recorded as lost."""
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
        with suppress(UserError), given.run.lock() as mine:
            if mine:
                job.mark(given.run, status, reason)

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
