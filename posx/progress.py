"""Progress of long work: a Rich bar on a terminal, one plain line every few seconds elsewhere.

Everything goes to stderr; stdout is for data. A worker process of a sweep sends all of it to the
process that shows the sweep.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0
SEND_EVERY_S = 0.5


@dataclass(frozen=True)
class Step:
    """How far long work has come."""

    doing: str  # trains | evaluates
    done: int
    total: int
    facts: Mapping[str, str]  # such as {"loss": "0.12", "acc": "0.98"}


Sink = Callable[[Step | str], None]
_sink: Sink | None = None  # None: this process writes to stderr itself


def divert(sink: Sink | None) -> None:
    """From now on all progress and sentences of this process go to `sink`."""
    global _sink
    _sink = sink


class Bar:
    """One line of progress: what is done, facts about it, speed and time left."""

    def __init__(self, title: str, total: int, done: int = 0, doing: str = "trains") -> None:
        self.title, self.total, self.done, self.doing = title, total, done, doing
        self.started, self.first = time.monotonic(), done
        self.last_line = self.started
        console = Console(stderr=True)
        self.rich: Progress | None = None
        if console.is_terminal and _sink is None:
            self.rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.rich.add_task(title, total=total, completed=done, facts="")

    def __enter__(self) -> "Bar":
        if self.rich is not None:
            self.rich.start()
        self._send({})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.rich is not None:
            self.rich.stop()

    def update(self, done: int, facts: Mapping[str, str], total: int | None = None) -> None:
        """`done` of `total` steps; `facts` are short, such as {"loss": "0.12", "acc": "0.98"}."""
        self.done, self.total = done, total or self.total
        if self.rich is not None:
            self.rich.update(self.task, completed=done, total=self.total, facts=_text(facts))
            return
        now = time.monotonic()
        if now - self.last_line < (LINE_EVERY_S if _sink is None else SEND_EVERY_S):
            return
        self.last_line = now
        if _sink is not None:
            self._send(facts)
            return
        speed = (self.done - self.first) / (now - self.started)
        left = (self.total - self.done) / speed if speed > 0 else 0.0
        say(f"{self.title}: {self.done}/{self.total}  {_text(facts)}  about {left:.0f} s left")

    def _send(self, facts: Mapping[str, str]) -> None:
        if _sink is not None:
            _sink(Step(self.doing, self.done, self.total, facts))


def _text(facts: Mapping[str, str]) -> str:
    return "  ".join(f"{key} {value}" for key, value in facts.items())


def say(text: str) -> None:
    """One plain sentence to stderr."""
    if _sink is not None:
        _sink(text)
        return
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(text)
