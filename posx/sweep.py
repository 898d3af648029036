"""`posx train`: what Hydra calls for each job of a command, and what is said of all of them."""

import os
import shlex
from collections import Counter
from signal import Signals

from omegaconf import DictConfig

from posx import hydra_app, job
from posx.errors import RunFailed, UserError
from posx.job import SIGNALLED, Job, Outcome
from posx.progress import say

TOLD = {"there": "there before", "elsewhere": "left to another process"}


def run_jobs(words: list[str]) -> None:
    """One run, or with -m a sweep; `words` are Hydra's overrides and flags.

    Raises:
        UserError: the words or the config are wrong.
        RunFailed: a run broke or was stopped; the others of a sweep were still trained.
    """
    sweep = Sweep(words)
    try:
        hydra_app.run(sweep, "train", words)
    except KeyboardInterrupt:
        if sweep.signal is None:
            raise
    sweep.sum_up()


class Sweep:
    """The task function of one command."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.begun = False
        self.process = os.getpid()
        self.ended: list[tuple[list[str], Outcome]] = []  # the overrides of each job
        self.planned = 0  # jobs, where that is known
        self.signal: int | None = None  # that ended the sweep before all was done
        self.error: UserError | RunFailed | None = None  # the last one

    def name(self, overrides: list[str]) -> str:
        """What makes a job differ from the others of its sweep, such as `scheme=rope seed=1`."""
        given = {_bare(word) for word in self.words}
        differing = " ".join(word for word in overrides if _bare(word) not in given)
        return differing or " ".join(overrides) or "the default run"

    def again(self, overrides: list[str]) -> str:
        """The command that does only this job."""
        return shlex.join(["posx", "train", *hydra_app.config_words(self.words), *overrides])

    def prepare(self, node: DictConfig) -> Job | Outcome:
        """A job to be done elsewhere, or what there is to say of it without doing it."""
        self.begun = True
        try:
            prepared = job.prepare(node)
        except UserError as error:
            return job.outcome_of(error)
        return job.there(prepared) or prepared

    def __call__(self, node: DictConfig) -> float:
        """Do a job in this process; returns the in-range loss, for sweepers. Raises only where
        Hydra does not end the sweep for it, that is in the process of a launcher, or when the user
        asked to stop."""
        self.begun = True
        overrides = job.overrides()
        try:
            prepared = job.prepare(node)
            outcome = job.work(prepared)
        except (UserError, RunFailed) as error:
            if os.getpid() != self.process:
                say(f"posx: {self.name(overrides)}: {error}")
                raise
            self.error = error
            self.ended.append((overrides, job.outcome_of(error)))
            if error.code > SIGNALLED:
                self.signal = error.code - SIGNALLED
                raise KeyboardInterrupt from None
            return float("nan")
        if outcome is None:
            text = f"{prepared.run}: another process is working on this run; left alone"
            outcome = Outcome("elsewhere", text)
        self.ended.append((overrides, outcome))
        already = "already trained: " if outcome.state == "there" else ""
        say(f"{already}{outcome.text}\n  {prepared.run}")
        return outcome.value

    def sum_up(self) -> None:
        """What failed and how to try it again.

        Raises:
            UserError, RunFailed: a job failed, or a signal ended the sweep.
        """
        if len(self.ended) == 1 and self.error is not None:
            raise self.error
        if len(self.ended) > 1:
            states = Counter(outcome.state for _, outcome in self.ended)
            told = ", ".join(f"{n} {TOLD.get(state, state)}" for state, n in states.items())
            say(f"{len(self.ended)} runs: {told}")
        failures = [
            (overrides, outcome)
            for overrides, outcome in self.ended
            if outcome.code and outcome.state != "stopped"
        ]
        for overrides, outcome in failures:
            say(f"posx: {self.name(overrides)}: {outcome.text}")
            say(f"    {self.again(overrides)}")
        if self.signal is not None:
            left = self.planned - len(self.ended)
            unbegun = f" with {left} of {self.planned} runs not begun" if left > 0 else ""
            raise RunFailed(
                f"stopped by {Signals(self.signal).name}{unbegun}; the same command goes on",
                SIGNALLED + self.signal,
            )
        if failures:
            names = "; ".join(self.name(overrides) for overrides, _ in failures)
            raise RunFailed(f"{len(failures)} of {len(self.ended)} runs failed: {names}")


def _bare(word: str) -> str:
    """A word without what makes no difference to Hydra."""
    return word.translate(str.maketrans("", "", " '\""))
