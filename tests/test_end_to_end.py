"""Schemes and tasks of the catalogue from training to the report, as a user runs it."""

from pathlib import Path

import pandas as pd
import pytest
from conftest import HERE, QUICK, Posx

from posx import catalog

# Each with another way through the program: a table with an end, a scheme in a scheme, drawn
# positions, state, a mask, other weights.
FEW = ["nope", "learned", "alibi", "rnope", "randomized", "fox", "window", "stickbreaking"]
TASKS = catalog.files("task")
SHORT = {"learned", "music_shaw", "tupe"}  # tables of the training length


@pytest.mark.parametrize(
    "schemes",
    [FEW, pytest.param([*catalog.files("scheme")], marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_schemes_train_are_evaluated_and_reported(
    posx: Posx, tmp_path: Path, schemes: list[str]
) -> None:
    names = [f"scheme={','.join(schemes)}", f"task={','.join(TASKS)}"]
    posx("train", "-m", *names, *QUICK, HERE)
    posx("eval", "--lengths", "1x,2x", "--sequences", "3")
    tables = [pd.read_csv(path) for path in (tmp_path / "results" / "runs").rglob("eval.csv")]
    rows = pd.concat(tables)
    assert len(tables) == len(schemes) * len(TASKS)
    assert sorted(rows["length"].unique()) == [16, 32]
    beyond = rows[~rows["computes"]]
    assert set(beyond["scheme"]) == SHORT & {*schemes}
    assert set(beyond["status"]) == {"out_of_range"}
    assert set(rows[rows["computes"]]["verdict"]) == {"untrained"}  # 12 steps teach nothing
    text = posx("report").stdout
    for name in (*schemes, *TASKS):
        assert name in text

    again = posx("eval", "--lengths", "1x,2x", "--sequences", "3")
    assert "evaluated" in again.stderr
    after = [pd.read_csv(path) for path in (tmp_path / "results" / "runs").rglob("eval.csv")]
    pd.testing.assert_frame_equal(pd.concat(after), rows)  # seconds too: nothing was computed


def test_other_evaluation_sequences_are_another_cell(posx: Posx, tmp_path: Path) -> None:
    posx("train", "scheme=nope", *QUICK)
    words = ("eval", "--lengths", "24", "--sequences", "3")
    path = next((tmp_path / "results" / "runs").glob("*/*/*")) / "eval.csv"
    posx(*words)
    first = pd.read_csv(path)
    posx(*words, "--eval-seed", "1")
    second = pd.read_csv(path)
    assert list(first["eval_seed"]) == [0, 0]
    assert list(second["eval_seed"]) == [1, 1]
    assert list(first["loss"]) != list(second["loss"])
    assert "not all cells are of the same sequences" not in posx("report").stdout
    posx("eval", "--lengths", "24")  # without a number of sequences: the full evaluation
    assert (pd.read_csv(path)["sequences"] > 3).all()
    posx(*words)
    assert (pd.read_csv(path)["sequences"] > 3).all()  # a quick look replaces nothing better
    posx(*words, "--again")
    third = pd.read_csv(path)
    assert list(third["loss"]) == list(first["loss"])
