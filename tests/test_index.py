"""The index of evaluations: it saves time, and nothing that it may hold changes a report."""

import math
import os
from pathlib import Path

import pandas as pd
import pytest
from test_report import LENGTHS, exported, flat, make_run

from posx import index
from posx.collect import collect
from posx.runs import EVAL_DTYPES, Run, find


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Five runs, of which three renew an index; the first has reasons, and one no evaluation."""
    monkeypatch.setattr(index, "BEHIND", 3)
    make_run(tmp_path, "learned", {64: 1.0, **dict.fromkeys(LENGTHS[1:])})
    make_run(tmp_path, "cope", {}, status="interrupted", converged=None)
    for seed in range(3):
        make_run(tmp_path, "rope", {**flat(1.0), 256: 0.5 + seed / 7}, seed=seed)
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """The run folders whose eval.csv is opened."""
    names: list[str] = []
    whole = Run.table

    def table(run, name):
        names.append(run.folder.name)
        return whole(run, name)

    monkeypatch.setattr(Run, "table", table)
    return names


def files(results):
    return sorted(path.name for path in (results / ".index").glob("*"))


def run_of(results, scheme, seed=0):
    (folder,) = (results / "runs/copy" / scheme).glob(f"seed{seed}-*")
    return Run(folder)


def test_rows_are_those_of_the_files_with_and_without_an_index(results, opened):
    want = pd.concat([run.table("eval") for run in find(results)[0]])
    opened.clear()
    for expected in (4, 0):  # of five runs one was never evaluated
        rows, broken = index.evaluations(find(results)[0], results)
        assert len(opened) == expected
        opened.clear()
        assert broken == {}
        pd.testing.assert_frame_equal(
            rows[[*EVAL_DTYPES]].reset_index(drop=True),
            want.astype(EVAL_DTYPES).reset_index(drop=True),
            check_exact=True,
        )
    assert rows["reason"].isna().tolist() == [True] + [False] * 5 + [True] * 18
    assert rows["folder"].nunique() == 4


def test_few_runs_have_no_index(tmp_path):
    make_run(tmp_path, "rope", flat(1.0))
    exported(tmp_path, "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_only_what_changed_is_read_again(results, opened):
    before = exported(results, "csv")
    rope = run_of(results, "rope", seed=1)
    table = rope.table("eval")
    opened.clear()
    rope.write_table("eval", table)  # the same text in a new file
    assert exported(results, "csv") == before
    assert opened == [rope.folder.name]
    rope.write_table("eval", table.assign(token_acc=0.25))
    assert exported(results, "csv") != before


def test_a_file_of_the_same_size_and_time_is_another_file(results):
    """Clocks may stand still or go backwards."""
    exported(results, "csv")
    rope = run_of(results, "rope")
    path = rope.folder / "eval.csv"
    then = path.stat()
    rope.write_table("eval", rope.table("eval").replace({"sequences": {100: 900}}))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_size == then.st_size
    rows, _ = index.evaluations(find(results)[0], results)
    assert set(rows["sequences"]) == {100, 900}


def test_runs_that_are_gone_or_new(results, opened):
    exported(results, "csv")
    opened.clear()
    for path in run_of(results, "rope", seed=2).folder.iterdir():
        path.unlink()
    new = make_run(results, "alibi", flat(0.5))
    data = collect(find(results)[0], results)
    assert opened == [new.folder.name]
    assert data.rows.groupby("label").size().to_dict() == {"alibi": 6, "learned": 6, "rope": 12}


def test_a_report_of_some_runs_keeps_the_index_of_the_others(results, opened):
    for seed in range(3):
        make_run(results, "nope", flat(0.5), seed=seed)
    exported(results, "csv", schemes=["rope"])  # renews the index
    exported(results, "csv", schemes=["nope"])  # and renews it again
    opened.clear()
    exported(results, "csv", schemes=["rope"])
    assert opened == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path):
    path.write_text("PAR1 is what such files begin with")


def rename(path):
    path.rename(path.with_name("a.parquet"))


def of_other_columns(path):
    import duckdb

    duckdb.sql("select 1 as folder").write_parquet(str(path))
    signed(path)


def signed(path):
    digest = index.hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(path.with_name(f"{digest}.parquet"))


@pytest.mark.parametrize("damage", [cut, flip, foreign, rename, of_other_columns, Path.unlink])
def test_a_damaged_index_is_none(results, opened, damage):
    before = exported(results, "csv")
    (name,) = files(results)
    opened.clear()
    damage(results / ".index" / name)
    assert exported(results, "csv") == before
    assert len(opened) == 4
    assert files(results) == [name]  # it is made again


def test_what_a_killed_writer_left_is_cleaned(results):
    (results / ".index").mkdir()
    (results / ".index" / ".old.parquet.0123").write_text("half")
    exported(results, "csv")
    (name,) = files(results)
    assert name.endswith(".parquet")


@pytest.mark.parametrize("where", ["index", "temporary folder"])
def test_a_disk_that_cannot_be_written_costs_only_time(results, where, monkeypatch, tmp_path):
    before = exported(results, "csv")
    for path in (results / ".index").iterdir():
        path.unlink()
    if where == "index":
        (results / ".index").rmdir()
        (results / ".index").write_text("in the way")
    else:
        monkeypatch.setattr(index.tempfile, "tempdir", str(tmp_path / "none"))
    assert exported(results, "csv") == before
    assert not (results / ".index").is_dir() or not files(results)


def test_a_broken_table_is_named_and_never_remembered(results, opened):
    path = run_of(results, "rope").folder / "eval.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    for _ in range(2):
        opened.clear()
        rows, broken = index.evaluations(find(results)[0], results)
        assert ["cut short" in text for text in broken.values()] == [True]
        assert len(rows) == 18
    assert len(opened) == 1
    path.write_bytes(whole)
    assert len(index.evaluations(find(results)[0], results)[0]) == 24


def test_a_text_that_only_late_rows_have(tmp_path):
    """Old versions of DuckDB guess the kind of a column from its first thousand rows."""
    for seed in range(200):
        make_run(tmp_path, "rope", flat(1.0), seed=seed)
    make_run(tmp_path, "sinusoidal", {64: 1.0, **dict.fromkeys(LENGTHS[1:])})
    for _ in range(2):
        rows, _ = index.evaluations(find(tmp_path)[0], tmp_path)
        assert rows["reason"].iloc[-1] == "a table of 64 rows"
        assert math.isnan(rows["reason"].iloc[0])
    assert len(files(tmp_path)) == 1
