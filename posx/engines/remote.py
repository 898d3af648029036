"""What engines share whose jobs run on other machines: the results folder is on a disk that all of
them see, and there each job keeps a diary of how far it is, one JSON object a line."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posx import job, progress
from posx.engines import Begun, Done, Lost, Message
from posx.errors import UserError
from posx.job import Job, Outcome
from posx.progress import Step

WRITE_EVERY_S = 2.0  # steps of a job in its diary
READ_EVERY_S = 2.0
AT_ONCE = 1000  # jobs submitted where nothing is said; Slurm's own limit of an array is 1001


# -- there -----------------------------------------------------------------------------------------


class Diary:
    """Appends what a job says to a file; a disk that is away for a moment is no reason to end."""

    def __init__(self, path: Path) -> None:
        self.path, self.written = path, 0.0

    def __call__(self, message: Begun | Step | str) -> None:
        if isinstance(message, Step):
            if time.monotonic() - self.written < WRITE_EVERY_S:
                return
            self.written = time.monotonic()
            entry: Any = asdict(message)
        else:
            entry = message if isinstance(message, str) else {}
        with suppress(OSError), self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def carry_out(given: Job, path: Path) -> Outcome | None:
    """Do a job in this process, with its diary at `path`."""
    diary = Diary(path)
    diary(Begun())
    progress.divert(diary)
    try:
        return job.carry_out(given)
    finally:
        progress.divert(None)


# -- here ------------------------------------------------------------------------------------------


class RemoteEngine(ABC):
    """Jobs by the handles of a cluster; what differs between clusters is below `submit`."""

    def __init__(self, jobs: int | None, folder: Path) -> None:
        if jobs is not None and jobs < 1:
            raise UserError(f"hydra.launcher.jobs={jobs}: must be at least 1")
        self.size = jobs or AT_ONCE
        self.folder = folder
        self.handles: dict[int, Any] = {}
        self.read: dict[int, int] = {}  # bytes of each diary
        self.looked = 0.0

    def room(self) -> int:
        return self.size - len(self.handles)

    def submit(self, jobs: Mapping[int, Job]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in jobs.keys() - self.read.keys():
            self.diary(number).unlink(missing_ok=True)  # of an earlier sweep in the same folder
            self.read[number] = 0
        self.handles |= self.send({number: (jobs[number], self.diary(number)) for number in jobs})

    def listen(self, seconds: float) -> Iterator[tuple[int, Message]]:
        time.sleep(seconds)
        if time.monotonic() - self.looked < READ_EVERY_S:
            return
        self.looked = time.monotonic()
        ended = self.ended()
        for number in self.handles:
            for entry in self._entries(number):
                yield number, entry
        for number, end in ended.items():
            del self.handles[number]
            if isinstance(end, Done) and end.outcome is not None and end.outcome.state == "stopped":
                end = Lost(end.outcome.text)  # not by this process, or it knows
            yield number, end

    def diary(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def _entries(self, number: int) -> Iterator[Begun | Step | str]:
        """What the diary of a job has got since the last look, whole lines only."""
        try:
            with self.diary(number).open("rb") as file:
                file.seek(self.read[number])
                text = file.read()
        except OSError:
            return  # it has not begun
        whole = text[: text.rfind(b"\n") + 1]
        self.read[number] += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):  # two attempts at once, each half a line
                entry = json.loads(line)
                yield entry if isinstance(entry, str) else Step(**entry) if entry else Begun()

    # -- what an engine defines --------------------------------------------------------------------

    @abstractmethod
    def send(self, jobs: Mapping[int, tuple[Job, Path]]) -> Mapping[int, Any]:
        """Have the cluster call `carry_out` on each; returns a handle of each."""

    @abstractmethod
    def ended(self) -> Mapping[int, Done | Lost]:
        """What became of the handles whose jobs have ended."""

    @abstractmethod
    def stop(self, kill: bool) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
