"""What is measured of a scheme, with a clock that the test sets."""

import subprocess
import sys

import pytest
import torch

from posx import conformance, cost
from posx.schemes.absolute import Learned
from posx.schemes.base import Nope


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> cost.Meter:
    """A meter for which work takes one second without a scheme, else three."""
    monkeypatch.setattr(cost, "LONG", 300)
    meter = cost.Meter(conformance.MODEL)

    def seconds(work) -> cost.Seconds:
        work()
        return cost.Seconds(cpu=1.0 if work.args[0] is meter.plain else 3.0, wall=2.0)

    monkeypatch.setattr(cost, "_seconds", seconds)
    return meter


def test_times_are_ratios_to_no_positions(meter: cost.Meter) -> None:
    found = meter.measure(Nope)
    assert (found.train, found.long) == (3.0, 3.0)
    assert found.mib is not None
    assert 0 <= found.mib < 500


def test_a_table_is_not_measured_beyond_its_limit(meter: cost.Meter) -> None:
    found = meter.measure(Learned)  # 256 rows
    assert found == cost.Cost(3.0, None, None)


def test_memory_is_that_of_the_pass(meter: cost.Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory was given back before, so an allocation shows however often it is repeated."""

    def allocate(model, digits) -> None:
        torch.ones(40 * 2**20 // 4).sum()

    monkeypatch.setattr(cost, "_evaluate", allocate)
    for _ in range(2):
        found = meter.measure(Nope)
        assert found.mib is not None
        assert 39 < found.mib < 60


def test_threads_are_left_as_they_were(meter: cost.Meter) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        meter.measure(Nope)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_pieces_of_work_take_turns() -> None:
    done: list[str] = []
    times = cost.interleave({name: lambda n=name: done.append(n) for name in "ab"}, rounds=2)
    assert "".join(done) == "ababab"  # the first round is not measured
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}


def test_child_processes_count() -> None:
    code = "sum(range(3_000_000))"
    times = cost.interleave({"child": lambda: subprocess.run([sys.executable, "-c", code])}, 1)
    assert 0.005 < times["child"][0].cpu < 10
