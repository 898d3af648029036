"""One measurement a row, and the files that hold them."""

import csv
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from posx.cost import Seconds

COMPARE = {"<=": operator.le, ">=": operator.ge}
Times = dict[str, list[Seconds]]


@dataclass(frozen=True)
class Row:
    """What was reached: the median over rounds, the lowest and highest round, and the median by
    wall time where the number is a ratio of times."""

    group: str
    what: str
    goal: str  # such as "<= 1.05"; empty where a number only informs
    reached: float
    low: float | None = None
    high: float | None = None
    wall: float | None = None
    unit: str = "x"

    @property
    def met(self) -> str:
        if not self.goal:
            return ""
        compare, limit = self.goal.split()
        return "yes" if COMPARE[compare](self.reached, float(limit)) else "no"


def ratio(
    group: str, what: str, goal: str, times: Times, of: str, by: str, scale: float = 1
) -> Row:
    """Time of one piece of work by that of another, round by round, times `scale`."""
    pairs = list(zip(times[of], times[by], strict=True))
    cpu = [scale * own.cpu / other.cpu for own, other in pairs]
    wall = median(scale * own.wall / other.wall for own, other in pairs)
    return Row(group, what, goal, median(cpu), min(cpu), max(cpu), wall)


def write(folder: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """bench.csv and bench.md, the latter with the machine's description above it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(Row)), "met"])
        writer.writeheader()
        writer.writerows(asdict(row) | {"met": row.met} for row in rows)
    (folder / "bench.md").write_text("\n".join(_markdown(rows, facts)) + "\n", "utf-8")


def _markdown(rows: Iterable[Row], facts: dict[str, str]) -> Iterable[str]:
    yield from (f"- {name}: {fact}" for name, fact in facts.items())
    yield ""
    yield "Ratios of processor time, pieces of work in turns in one process, one thread: the median"
    yield "over rounds, the lowest and the highest round, and the median by wall time."
    yield ""
    yield "| group | what | goal | reached | spread | by wall time | met |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        spread = "" if row.low is None else f"{row.low:.3g} .. {row.high:.3g}"
        wall = "" if row.wall is None else f"{row.wall:.3g}"
        yield (
            f"| {row.group} | {row.what} | {row.goal} | {row.reached:.3g} {row.unit} | {spread} "
            f"| {wall} | {row.met} |"
        )
