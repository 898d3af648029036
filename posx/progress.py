"""Progress of long work: a Rich bar on a terminal, one plain line every few seconds elsewhere.

Everything goes to stderr; stdout is for data.
"""

import time
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


class Bar:
    """One line of progress: what is done, `facts` about it, speed and time left."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self.started, self.first = time.monotonic(), done
        self.last_line = self.started
        console = Console(stderr=True)
        self.rich: Progress | None = None
        if console.is_terminal:
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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.rich is not None:
            self.rich.stop()

    def update(self, done: int, facts: str, total: int | None = None) -> None:
        """`done` of `total` steps; `facts` is a short text such as `loss 0.12  acc 0.98`."""
        self.done, self.total = done, total or self.total
        if self.rich is not None:
            self.rich.update(self.task, completed=done, total=self.total, facts=facts)
            return
        now = time.monotonic()
        if now - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            speed = (self.done - self.first) / (now - self.started)
            left = (self.total - self.done) / speed if speed > 0 else 0.0
            say(f"{self.title}: {self.done}/{self.total}  {facts}  about {left:.0f} s left")


def say(text: str) -> None:
    """One plain sentence to stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(text)
