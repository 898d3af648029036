"""The benchmark's tables, and that a group runs; no time is judged here."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from posx.cost import Seconds

BENCH = Path(__file__).parent.parent / "scripts" / "bench"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


def test_ratios_are_taken_round_by_round() -> None:
    from table import ratio

    times = {
        "own": [Seconds(1, 4), Seconds(2, 4), Seconds(9, 4)],
        "peer": [Seconds(2, 2), Seconds(6, 2), Seconds(9, 2)],
    }
    row = ratio("train", "posx by peer", "<= 0.5", times, "own", "peer")
    assert (row.reached, row.low, row.high, row.wall) == (0.5, 1 / 3, 1.0, 2.0)
    assert row.met == "yes"
    assert ratio("train", "peer by posx", ">= 2.5", times, "peer", "own").met == "no"
    assert ratio("train", "no goal", "", times, "peer", "own").met == ""


def test_a_missing_peer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import models

    models.peer.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert models.llama(models.SMALL, 8) is None
    assert models.llama(models.LARGE, 8) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("transformers is not installed: its rows are left out")


def test_all_products_of_a_step_are_counted() -> None:
    """A block has 4 square matrices of width 64 and two of 64 x 256; each is used three times."""
    import models
    import training

    assert training.product_flops(models.SMALL, 10) == 3 * 2 * 10 * 2 * (4 * 64**2 + 2 * 64 * 256)
    training.products(models.SMALL, 10)()


def test_a_group_writes_its_tables(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--quick", "--group", "report", "--rounds", "1"]
    subprocess.run([*command, "--output", tmp_path], check=True, capture_output=True)
    with (tmp_path / "bench.csv").open() as file:
        row, *_ = csv.DictReader(file)
    assert row["group"] == "report"
    assert float(row["reached"]) > 0
    text = (tmp_path / "bench.md").read_text()
    assert "- processor: " in text
    assert f"| report | {row['what']} |" in text


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--group", "speed", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "speed is not known: use train, long-eval, decode, start-up, report" in " ".join(
        done.stderr.replace("│", " ").split()
    )
    assert not list(tmp_path.iterdir())
