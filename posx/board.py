"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from posx.job import Outcome
from posx.progress import Step, say

DRAW_EVERY_S = 1.0
LINE_EVERY_S = 30.0
ROOM = 4  # lines of the terminal that are not rows: head, total, what is left out, prompt
# States in the order in which they are shown where there is no room for all, and their style.
STATES = {
    **{"failed": "red", "refused": "red", "lost": "red", "stopped": "yellow"},
    **{"trains": "bold", "evaluates": "bold", "starts": "bold"},
    **{"elsewhere": "yellow", "queued": "dim", "finished": "green", "waits": "dim", "there": "dim"},
}
AT_WORK = ("starts", "trains", "evaluates")
FAILED = ("failed", "refused", "lost")
ENDED = (*FAILED, "stopped", "finished", "there")
NAMED = 4  # jobs at work that a plain line tells of


@dataclass
class Row:
    """One job."""

    name: str
    state: str = "waits"
    step: Step | None = None
    began: float = 0.0  # when a process took it up
    since: float = 0.0  # when the step counter stood at `first`
    first: int = 0

    def left(self, now: float) -> float | None:
        """Seconds until it is through its steps, if it goes on as since its first report."""
        if self.step is None or self.step.done <= self.first:
            return None
        speed = (self.step.done - self.first) / max(now - self.since, 1e-3)
        return (self.step.total - self.step.done) / speed


class Board:
    """All jobs of a sweep by their number."""

    def __init__(self, names: Sequence[str], workers: int) -> None:
        self.rows = [Row(name) for name in names]
        self.workers = workers
        self.took: list[float] = []  # seconds of each job that was done here
        self.drawn = time.monotonic()
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "Board":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.update(self.table(), refresh=True)
            self.live.stop()

    # -- what happens ------------------------------------------------------------------------------

    def starts(self, number: int) -> None:
        row = self.rows[number]
        row.state, row.step, row.began = "starts", None, time.monotonic()

    def goes_on(self, number: int, step: Step) -> None:
        row = self.rows[number]
        if row.step is None or row.step.doing != step.doing:
            row.since, row.first = time.monotonic(), step.done
        row.state, row.step = step.doing, step

    def waits(self, number: int, state: str) -> None:
        """It `waits` to be submitted, is `queued`, or its run is worked on `elsewhere`."""
        self.rows[number].state, self.rows[number].step = state, None

    def ended(self, number: int, outcome: Outcome) -> None:
        row = self.rows[number]
        if outcome.state == "finished":
            self.took.append(time.monotonic() - row.began)
        row.state = outcome.state
        if outcome.state in FAILED or (self.live is None and outcome.state != "there"):
            done = sum(row.state in ENDED for row in self.rows)
            self.say(f"{done}/{len(self.rows)}  {row.name}: {outcome.state}; {outcome.text}")

    def say(self, text: str) -> None:
        """A sentence, above the table where there is one."""
        if self.live is None:
            say(text)
        else:
            self.live.console.print(text)

    def tick(self) -> None:
        """Called every now and then: draws, or prints a line."""
        now = time.monotonic()
        if now - self.drawn < (LINE_EVERY_S if self.live is None else DRAW_EVERY_S):
            return
        self.drawn = now
        if self.live is None:
            running = [_brief(row) for row in self.rows if row.state in AT_WORK]
            say("; ".join([self.total(), *running[:NAMED]]))
        else:
            self.live.update(self.table(), refresh=True)

    # -- how it looks ------------------------------------------------------------------------------

    def total(self) -> str:
        """The whole sweep in one line."""
        states = [row.state for row in self.rows]
        parts = {
            "done": sum(state in ("finished", "there") for state in states),
            "failed": sum(state in FAILED for state in states),
            "stopped": states.count("stopped"),
            "running": sum(state in AT_WORK for state in states),
            "queued": states.count("queued"),
            "elsewhere": states.count("elsewhere"),
        }
        told = ", ".join(f"{n} {name}" for name, n in parts.items() if n or name == "done")
        left = self.left()
        return f"{told} of {len(states)}" + (f", about {clock(left)} left" if left else "")

    def left(self) -> float | None:
        """Seconds until the end: what runs goes on as it does, the others take as long as those
        before them, or as long as what runs now."""
        now = time.monotonic()
        running = [row for row in self.rows if row.state in AT_WORK]
        known = [(row, left) for row in running if (left := row.left(now)) is not None]
        each = self.took or [now - row.began + left for row, left in known]
        if not each:
            return None
        mean = sum(each) / len(each)
        more = (
            sum(row.state in ("waits", "queued") for row in self.rows) + len(running) - len(known)
        )
        return (sum(left for _, left in known) + more * mean) / self.workers

    def table(self) -> Group:
        """As many rows as the terminal has lines for, the interesting ones first."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("job")  # the only one that gives way
        table.add_column("state", no_wrap=True)
        for head in ("step", "loss", "acc", "left"):
            table.add_column(head, justify="right", no_wrap=True)
        order = list(STATES)
        rows = sorted(self.rows, key=lambda row: order.index(row.state))
        height = 25 if self.live is None else self.live.console.height
        shown = rows[: max(1, height - ROOM)]
        for row in shown:
            table.add_row(row.name, Text(row.state, STATES[row.state]), *_cells(row))
        more = [Text(f"... and {len(rows) - len(shown)} more", "dim")]
        return Group(table, *more[: len(rows) - len(shown)], Text(self.total(), "bold"))


def _cells(row: Row) -> list[str]:
    """Step, loss, accuracy and time left of a job at work, or of one that was."""
    step = row.step
    if step is None:
        return []
    left = row.left(time.monotonic()) if row.state in AT_WORK else None
    return [
        f"{step.done}/{step.total}" if row.state in AT_WORK else "",
        step.facts.get("loss", ""),
        step.facts.get("acc", ""),
        "" if left is None else clock(left),
    ]


def _brief(row: Row) -> str:
    if row.step is None:
        return f"{row.name} {row.state}"
    facts = " ".join(f"{key} {value}" for key, value in row.step.facts.items())
    return f"{row.name} {row.state} {row.step.done}/{row.step.total} {facts}".rstrip()


def clock(seconds: float) -> str:
    """A duration as 5:09 or 1:05:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
