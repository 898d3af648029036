"""What does the jobs of a sweep: processes of this machine, or a cluster.

`posx.pool` keeps the books and is the same for all; an engine takes jobs and tells what it hears
of them. A new one is a module here and a launcher in hydra_plugins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from posx.job import Job, Outcome
from posx.progress import Step


@dataclass(frozen=True)
class Begun:
    """A process has taken the job up."""


@dataclass(frozen=True)
class Done:
    """The job has ended; None where another process was at its run."""

    outcome: Outcome | None


@dataclass(frozen=True)
class Lost:
    """The process that did the job is gone."""

    reason: str  # a sentence


Message = Begun | Step | str | Done | Lost


class Engine(Protocol):
    """Does jobs, which have numbers; every job that was submitted ends in `Done` or `Lost`."""

    size: int  # jobs at a time, as far as is known

    def room(self) -> int:
        """How many jobs it takes now."""
        ...

    def submit(self, jobs: Mapping[int, Job]) -> None:
        """Take jobs, not more than there is room for.

        Raises:
            UserError: they are refused, for a reason that holds for all.
        """
        ...

    def listen(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """What there is to tell, waiting about `seconds` where there is nothing."""
        ...

    def stop(self, kill: bool) -> None:
        """Have all jobs save and end, or end at once."""
        ...

    def close(self) -> None:
        """Leave nothing behind, after an error too; raises nothing."""
        ...
