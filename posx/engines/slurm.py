"""Slurm, through submitit: a job array, whose jobs save and go back into the queue when their time
is up or somebody else needs the node."""

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from posx.engines import Done, Lost
from posx.engines.remote import RemoteEngine, carry_out
from posx.errors import UserError
from posx.job import SIGNALLED, Job, Outcome
from posx.progress import say

ASK_EVERY_S = 20.0  # for the state of the jobs
GRACE_S = 15.0  # from the end of a job until its result is given up


class Task:
    """What submitit calls on the node."""

    def __call__(self, given: Job, diary: Path) -> Outcome | None:
        outcome = carry_out(given, diary)
        if outcome is not None and outcome.code > SIGNALLED:
            # The run is saved. A signal that means "your time is up" is submitit's, which puts the
            # job back into the queue and exits; any other ends the process, so that Slurm and not
            # a result says what becomes of the job.
            number = outcome.code - SIGNALLED
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return outcome

    def checkpoint(self, given: Job, diary: Path) -> Any:
        """What is to be done when the job comes again: the same, the run knows how far it is."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, given, diary)


class SlurmEngine(RemoteEngine):
    """At most `jobs` in Slurm's queue or running; `parameters` are those of submitit's executor.

    Raises:
        UserError: no submitit, no Slurm, or no such parameter.
    """

    def __init__(
        self, jobs: int | None, folder: Path, max_num_timeout: int, **parameters: Any
    ) -> None:
        super().__init__(jobs, folder)
        try:
            import submitit
        except ImportError:
            raise UserError(
                "hydra/launcher=slurm needs submitit: pip install 'posx[slurm]'"
            ) from None
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise UserError(
                "hydra/launcher=slurm: no sbatch here; start it on a login node of Slurm"
            )
        logging.getLogger("submitit").setLevel(logging.ERROR)
        if (reason := _no_accounts()) is not None:
            say(
                f"posx: sacct does not work here ({reason}): a job that is killed will not be "
                "noticed; ctrl-C twice and the same command go on"
            )
        self.executor = submitit.SlurmExecutor(folder, max_num_timeout=max_num_timeout)
        given = {key: value for key, value in parameters.items() if value is not None}
        try:
            self.executor.update_parameters(array_parallelism=self.size, **given)
        except (TypeError, ValueError) as error:
            raise UserError(f"hydra.launcher: {' '.join(str(error).split())}") from None
        self.asked = 0.0
        self.over: dict[int, float] = {}  # jobs that have ended and left no result: since when
        self.cancelled = self.killed = False

    def send(self, jobs: Mapping[int, tuple[Job, Path]]) -> Mapping[int, Any]:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            with redirect_stderr(StringIO()), self.executor.batch():
                handles = {number: self.executor.submit(Task(), *jobs[number]) for number in jobs}
        except (FailedJobError, FailedSubmissionError) as error:
            raise UserError(f"sbatch refuses: {' '.join(str(error).split())[-300:]}") from None
        return handles

    def ended(self) -> Mapping[int, Done | Lost]:
        if self.handles and (self.cancelled or time.monotonic() - self.asked > ASK_EVERY_S):
            self.asked = time.monotonic()
            next(iter(self.handles.values())).watcher.update()
        now, ends = time.monotonic(), {}
        for number, handle in self.handles.items():
            if handle.paths.result_pickle.exists():
                ends[number] = self._end(handle)
            elif self.killed or handle.done():
                # A result may take a while to be seen on this machine; submitit itself would wait
                # for each in turn.
                since = self.over.setdefault(number, now)
                if self.cancelled or now - since > GRACE_S:
                    told = f"ended as {handle.state}; its log is {handle.paths.stderr}"
                    ends[number] = Lost(f"Slurm job {handle.job_id} {told}")
                    _cancel([handle.job_id])  # should Slurm think better of it
            else:
                self.over.pop(number, None)
        return ends

    def _end(self, handle: Any) -> Done | Lost:
        from submitit.core.utils import UncompletedJobError

        try:
            return Done(handle.result())
        except UncompletedJobError as error:
            lines = str(error).split("\n")
            last = next((line for line in reversed(lines) if "not requeued" in line), "")
            told = last.partition(": ")[2] or f"failed; its log is {handle.paths.stderr}"
            return Lost(f"Slurm job {handle.job_id}: {told}")

    def stop(self, kill: bool) -> None:
        self.cancelled, self.killed = True, kill
        names = [handle.job_id for handle in self.handles.values()]
        if kill:  # plain scancel lets them save first
            _cancel(["--signal=KILL", "--full", *names])
        _cancel(names)

    def close(self) -> None:
        self.stop(kill=False)


def _cancel(words: list[str]) -> None:
    if words:
        subprocess.run(["scancel", *words], capture_output=True, check=False)


def _no_accounts() -> str | None:
    """Why Slurm cannot say what became of a job, or None."""
    words = ["sacct", "--noheader", "--allocations"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())
    return " ".join(asked.stderr.split()) if asked.returncode else None
