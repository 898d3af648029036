"""What a sweep shows: rows, counts, time left, plain lines."""

import io

import pytest
from rich.console import Console
from rich.live import Live

from posx import board as module
from posx.board import Board, clock
from posx.job import Outcome
from posx.progress import Step

NAMES = [
    f"scheme={scheme} task={task} seed={seed}"
    for scheme in ("sinusoidal", "rope", "alibi", "t5")
    for task in ("copy", "sort")
    for seed in (0, 1, 2)
]


class Clock:
    """In the place of the time module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def on_terminal(board: Board, width: int, height: int) -> Console:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    board.live = Live(console=console, auto_refresh=False)
    return console


def drawn(board: Board, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(board.table())
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.fixture
def busy(clock_of: Clock) -> Board:
    """24 jobs on 4 workers: one failed, one was there, one done in 60 s, four at work."""
    board = Board(NAMES, 4)
    board.live = None
    for number in range(1, 3):
        board.starts(number)
    clock_of.now += 60
    board.ended(0, Outcome("there", "before"))
    board.ended(1, Outcome("finished", "well"))
    board.ended(2, Outcome("lost", "killed", code=1))
    for number in range(3, 7):
        board.starts(number)
    for number in (3, 4):
        board.goes_on(number, Step("trains", 100, 5000, {}))
    board.goes_on(5, Step("evaluates", 0, 9, {}))
    clock_of.now += 10
    facts = {"loss": "1.234", "acc": "0.456", "tok/s": "20.1k"}
    board.goes_on(3, Step("trains", 1100, 5000, facts))
    board.goes_on(4, Step("trains", 600, 5000, facts))
    return board


@pytest.mark.parametrize("width", [80, 200])
def test_a_row_has_all_in_one_line(busy: Board, width: int) -> None:
    lines = drawn(busy, on_terminal(busy, width, 40))
    assert lines[0].split() == ["job", "state", "step", "loss", "acc", "left"]
    rows = {line[: len(NAMES[0])].strip(): line.split()[3:] for line in lines[1:25]}
    assert set(rows) == set(NAMES)
    assert rows[NAMES[3]] == ["trains", "1100/5000", "1.234", "0.456", "0:39"]
    assert rows[NAMES[4]] == ["trains", "600/5000", "1.234", "0.456", "1:28"]
    assert rows[NAMES[5]] == ["evaluates", "0/9"]
    assert rows[NAMES[6]] == ["starts"]
    assert rows[NAMES[2]] == ["lost"]
    assert lines[1].startswith(NAMES[2])  # what failed comes first
    assert max(map(len, lines)) <= width


def test_a_low_terminal_shows_what_matters(busy: Board) -> None:
    lines = drawn(busy, on_terminal(busy, 80, 12))
    assert len(lines) <= 12
    assert lines[1].startswith(NAMES[2])
    assert {line.split()[3] for line in lines[2:6]} == {"trains", "evaluates", "starts"}
    assert lines[-2] == "... and 16 more"
    assert lines[-1].startswith("2 done, 1 failed, 4 running of 24, about ")


def test_time_left_counts_those_that_wait(busy: Board) -> None:
    # 39 s and 88 s for those that train; 2 that do not say yet and 17 that wait, 60 s each
    assert busy.left() == pytest.approx((39 + 88 + 19 * 60) / 4)
    assert clock(busy.left() or 0) == "5:17"
    assert clock(3909) == "1:05:09"


def test_lines_where_there_is_no_terminal(
    clock_of: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Board(["a", "b", "c"], 1) as board:
        board.ended(0, Outcome("there", "before"))
        board.starts(1)
        board.goes_on(1, Step("trains", 5, 10, {"loss": "1.5"}))
        board.tick()  # too early for a line
        clock_of.now += module.LINE_EVERY_S
        board.tick()
        board.ended(1, Outcome("finished", "well"))
        board.ended(2, Outcome("failed", "badly", code=1))
    assert capsys.readouterr().err.splitlines() == [
        "1 done, 1 running of 3; b trains 5/10 loss 1.5",
        "2/3  b: finished; well",
        "3/3  c: failed; badly",
    ]
