"""Worker processes of this machine, one thread each."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait

from posx.engines import Begun, Done, Lost, Message
from posx.engines.worker import serve
from posx.errors import UserError
from posx.job import Job


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


class LocalEngine:
    """At most `jobs` workers, by default one a core; a worker that dies takes its job with it and
    nothing else."""

    def __init__(self, jobs: int | None) -> None:
        if jobs is not None and jobs < 1:
            raise UserError(f"hydra.launcher.jobs={jobs}: must be at least 1")
        self.size = jobs or usable_cores()
        self.workers: list[Worker] = []
        self.unannounced: list[int] = []  # jobs that were given and not yet told of

    def room(self) -> int:
        """One at a time, so that the first job does not wait for the second one to be prepared."""
        idle = any(worker.number is None for worker in self.workers)
        return int(idle or len(self.workers) < self.size)

    def submit(self, jobs: Mapping[int, Job]) -> None:
        for number, given in jobs.items():
            idle = [worker for worker in self.workers if worker.number is None]
            if not idle:
                idle = [Worker()]
                self.workers += idle
            idle[0].give(number, given)
            self.unannounced.append(number)

    def listen(self, seconds: float) -> Iterator[tuple[int, Message]]:
        begun, self.unannounced = self.unannounced, []
        for number in begun:
            yield number, Begun()
        pipes = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(pipes), seconds):
            worker = pipes[pipe]  # ty: ignore[invalid-argument-type]
            try:
                while worker.pipe.poll():
                    message, number = worker.pipe.recv(), worker.number
                    if number is None:
                        continue
                    if isinstance(message, Done):
                        worker.number = None
                    yield number, message
            except (EOFError, OSError):
                self.workers.remove(worker)
                reason = worker.death()
                if worker.number is not None:
                    yield worker.number, Lost(reason)

    def stop(self, kill: bool) -> None:
        for worker in self.workers:
            worker.process.kill() if kill else worker.process.terminate()

    def close(self) -> None:
        self.stop(kill=False)
        for worker in self.workers:
            worker.end()
