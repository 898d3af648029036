"""Reports from run folders made by hand, so that every number can be worked out on paper."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
import zlib

import pandas as pd
import pytest
from rich.console import Console

from posx import plot, render, report, stats, summary
from posx.choose import choose
from posx.collect import METRICS, collect
from posx.errors import UserError
from posx.grids import CAVEAT, LEGEND, SUMMARY_LEGEND, loose_ends
from posx.runs import EVAL_COLUMNS, SCHEMA, TRAIN_COLUMNS, Run, find, folder_of

LONG = "hard_alibi scheme.window=16 scheme.a_very_long_parameter_name_of_a_user=0.125"
LENGTHS = (64, 72, 96, 128, 256, 512)
SEQUENCES = 100


def eval_row(scheme, length, acc, *, task="copy", seed=0, extension="none", trained=True, **other):
    """An eval.csv row with the accuracy `acc` (None: out of range), of SEQUENCES sequences."""
    computes, items = acc is not None, (length - 3) // 2
    chance = round(sum(1 / k for k in range(1, items + 1)) / items, 6)
    row = dict.fromkeys(EVAL_COLUMNS, math.nan)
    row |= {"scheme": scheme, "extension": extension, "task": task, "seed": seed}
    row |= {"train_len": 64, "length": length, "items": items, "sequences": SEQUENCES}
    row |= {"eval_seed": 0}
    row |= {"computes": computes, "status": "ok" if computes else "out_of_range"}
    row |= {"reason": None if computes else "a table of 64 rows", "chance": chance}
    row["verdict"] = "cannot"
    if computes:
        tokens = SEQUENCES * items
        lo, hi = stats.wilson(acc * tokens, tokens)
        row |= {"token_acc": acc, "token_acc_lo": lo, "token_acc_hi": hi, "exact_match": acc / 2}
        row |= {"skill": stats.skill(acc, chance), "tokens_per_s": 1234.5, "peak_mb": 10.0}
        row["verdict"] = stats.verdict(True, lo, stats.skill(hi, chance), trained)
    return row | other


def make_run(
    results, scheme, accs, *, task="copy", seed=0, group=None, label=None, converged=True, **other
):
    """A run folder with one eval.csv row a value of `accs`, a dict of length or (extension, length)
    to accuracy."""
    group = group or f"{zlib.crc32((label or scheme).encode()):08x}"
    run = Run(
        folder_of(results, task, scheme, seed, f"{zlib.crc32(f'{group}{seed}'.encode()):08x}")
    )
    run.folder.mkdir(parents=True)
    record = {"schema": SCHEMA, "status": "finished", "reason": "", "scheme": scheme, "task": task}
    record |= {"seed": seed, "data_seed": 0, "train_len": 64, "label": label or scheme}
    record |= {"group": group, "hash": run.folder.name, "converged": converged, "steps": 1000}
    run.write_record(record | {"steps_to_target": 800, "parameters": 9, "wall_s": 1.5} | other)
    run.write_table("train", pd.DataFrame(columns=list(TRAIN_COLUMNS)))
    at = {key if isinstance(key, tuple) else ("none", key): acc for key, acc in accs.items()}
    first = at.get(("none", 64))
    tokens = SEQUENCES * 30
    trained = first is not None and stats.is_trained(stats.wilson(first * tokens, tokens)[0])
    rows = [
        eval_row(scheme, length, acc, task=task, seed=seed, extension=extension, trained=trained)
        for (extension, length), acc in at.items()
    ]
    if rows:
        run.write_table("eval", pd.DataFrame(rows))
    return run


def flat(acc):
    return dict.fromkeys(LENGTHS, acc)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Eleven runs in eight groups, one of them on a second task; tests only read them."""
    root = tmp_path_factory.mktemp("results")
    for seed, acc in enumerate((0.96, 0.90, 0.84)):
        make_run(root, "rope", {**flat(1.0), 128: acc, 256: 0.5, 512: 0.0}, seed=seed)
    base = "rope scheme.base=100"
    yarn = {("yarn", length): 1.0 for length in LENGTHS}
    make_run(root, "rope", {**flat(0.99), **yarn}, label=base)
    make_run(root, "learned", {64: 1.0, **dict.fromkeys(LENGTHS[1:])})
    make_run(root, "nope", flat(0.97), seed=0)
    make_run(root, "nope", flat(0.6), seed=1, converged=False)
    make_run(root, "nope", {}, seed=2, converged=None, status="failed", reason="loss is NaN")
    make_run(root, "hard_alibi", flat(1.0), label=LONG)
    make_run(root, "cope", {}, status="interrupted", converged=None)
    make_run(root, "rope", {64: 1.0, 128: 0.3, 8192: 0.2}, task="sort", group="sorted")
    return root


N_ROWS = 6 * 3 + 12 + 6 + 12 + 6 + 3


def load(root):
    """The runs below `root`, by their inventory and their rows."""
    data = collect(runs_of(root), root)
    return data.runs, summary.records(data.rows, data.rows)


def runs_of(root):
    return find(root)[0]


def printed(root, width, **options):
    """What `posx report` prints to something that is not a terminal."""
    file = io.StringIO()
    report.report(runs_of(root), root, console=Console(file=file, width=width), **options)
    return file.getvalue()


def exported(root, fmt, **options):
    return printed(root, 80, fmt=fmt, **options)


def curve_of(curves, label, extension="none", task="copy"):
    found = curves[
        (curves["label"] == label) & (curves["extension"] == extension) & (curves["task"] == task)
    ]
    assert len(found) == 1
    return found.iloc[0]


# -- long rows -----------------------------------------------------------------------------------


def test_every_row_in_is_a_row_out(results):
    data = collect(runs_of(results), results)
    known, rows = data.runs, data.rows
    assert len(known) == 11
    assert len(rows) == N_ROWS
    for metric in ("token_acc", "peak_mb"):
        table = summary.cells(summary.evaluations(data, metric), metric)
        assert table["n_seeds"].sum() == N_ROWS
    long = summary.long(data, "token_acc")
    assert long["n_seeds"].sum() == N_ROWS
    assert set(long["label"]) == set(known["label"])


def test_groups_are_never_pooled_even_under_one_label(tmp_path):
    make_run(tmp_path, "rope", flat(1.0), seed=0, group="aaaaaaaa")
    make_run(tmp_path, "rope", flat(0.98), seed=1, group="bbbbbbbb")
    _, rows = load(tmp_path)
    table = summary.cells(rows)
    assert set(table["label"]) == {"rope #aaaaaa", "rope #bbbbbb"}
    assert set(table["n_seeds"]) == {1}
    assert "rope #aaaaaa" in printed(tmp_path, 80)


def test_seeds_of_a_group_are_mean_min_and_max(results):
    _, rows = load(results)
    table = summary.cells(rows)
    cell = table[(table["label"] == "rope") & (table["task"] == "copy") & (table["length"] == 128)]
    (cell,) = cell.to_dict("records")
    assert (cell["n_seeds"], cell["n_computing"]) == (3, 3)
    assert (cell["mean"], cell["min"], cell["max"]) == pytest.approx((0.90, 0.84, 0.96))
    assert cell["chance"] == pytest.approx(sum(1 / k for k in range(1, 63)) / 62, abs=1e-6)


def test_one_seed_has_no_spread(results):
    _, rows = load(results)
    single = summary.cells(rows).query("n_seeds == 1")
    assert len(single) > 0
    assert single[["min", "max"]].isna().all(axis=None)


def test_the_pooled_verdict_can_differ_from_the_worst_seeds(tmp_path):
    for seed, acc in enumerate((1.0, 1.0, 0.94)):
        make_run(tmp_path, "alibi", {**flat(1.0), 128: acc}, seed=seed)
    known, rows = load(tmp_path)
    cell = summary.cells(rows).query("length == 128").iloc[0]
    assert (cell["verdict"], cell["verdict_worst"]) == ("performs", "degrades")
    (curve,) = summary.summarise(rows, known).to_dict("records")
    assert (curve["performs_to"], curve["performs_to_worst"]) == (512, 96)
    assert (curve["factor"], curve["factor_worst"]) == (8, 1.5)
    assert "0.980 P/D" in printed(tmp_path, 80)


def test_a_length_that_some_seeds_cannot_compute(tmp_path):
    make_run(tmp_path, "alibi", flat(1.0), seed=0)
    make_run(tmp_path, "alibi", {**flat(1.0), 512: None}, seed=1)
    known, rows = load(tmp_path)
    cell = summary.cells(rows).query("length == 512").iloc[0]
    assert (cell["n_seeds"], cell["n_computing"], cell["mean"]) == (2, 1, 1.0)
    assert (cell["verdict"], cell["verdict_worst"]) == ("performs", "cannot")
    (curve,) = summary.summarise(rows, known).to_dict("records")
    assert (curve["computes_to"], curve["performs_to"]) == (256, 512)
    assert curve["performs_to_worst"] == 256


# -- the summary ---------------------------------------------------------------------------------


def test_summary_numbers_by_hand(results):
    known, rows = load(results)
    rope = curve_of(summary.summarise(rows, known), "rope")
    assert (rope["n_started"], rope["n_finished"], rope["n_converged"]) == (3, 3, 3)
    assert (rope["computes_to"], rope["performs_to"], rope["performs_to_worst"]) == (512, 96, 96)
    assert rope["factor"] == 1.5
    # 0.96 at 128 to 0.5 at 256 | exactly 0.90 at 128 | 1.0 at 96 to 0.84 at 128
    ends = 128 * 2 ** (0.06 / 0.46), 128.0, 96 * (128 / 96) ** (0.1 / 0.16)
    assert rope["effective_length"] == pytest.approx(sum(ends) / 3)
    assert rope["effective_length_min"] == pytest.approx(min(ends))
    assert rope["effective_length_max"] == pytest.approx(max(ends))
    assert not rope["effective_at_least"]


def test_aulc_of_the_summary_is_over_seeds(tmp_path):
    for seed, acc in enumerate((1.0, 0.0)):
        accs = {64: 1.0, 512: acc}
        make_run(tmp_path, "alibi", accs, seed=seed)
    known, rows = load(tmp_path)
    curve = curve_of(summary.summarise(rows, known), "alibi")
    assert (curve["aulc"], curve["aulc_min"], curve["aulc_max"]) == pytest.approx((0.75, 0.5, 1.0))
    assert curve["effective_at_least"]


def test_steps_are_over_converged_seeds(tmp_path):
    for seed, (steps, converged) in enumerate([(1000, True), (2000, True), (9000, False)]):
        make_run(tmp_path, "alibi", flat(1.0), seed=seed, steps=steps, converged=converged)
    known, rows = load(tmp_path)
    curve = curve_of(summary.summarise(rows, known), "alibi")
    assert (curve["steps"], curve["steps_min"], curve["steps_max"]) == (1500, 1000, 2000)
    assert curve["n_converged"] == 2


def test_untrained_seeds_count_but_do_not_speak(results):
    known, rows = load(results)
    nope = curve_of(summary.summarise(rows, known), "nope")
    assert (nope["n_started"], nope["n_finished"], nope["n_converged"]) == (3, 2, 1)
    assert (nope["n_evaluated"], nope["n_untrained"]) == (2, 1)
    assert nope["performs_to"] == nope["performs_to_worst"] == 512  # the trained seed's 0.97
    table = summary.cells(rows).query("label == 'nope'")
    untrained = table[~table["trained"]]
    assert list(untrained["length"]) == list(LENGTHS)
    assert set(untrained["verdict"]) == {"untrained"}
    assert set(table.loc[table["trained"], "mean"]) == {0.97}


def test_a_group_of_untrained_seeds_has_no_summary_numbers(tmp_path):
    make_run(tmp_path, "nope", flat(0.6), converged=False)
    known, rows = load(tmp_path)
    nope = curve_of(summary.summarise(rows, known), "nope")
    for name in ("performs_to", "performs_to_worst", "effective_length", "factor", "aulc", "steps"):
        assert math.isnan(nope[name])
    assert nope["computes_to"] == 512
    assert "0.600 U" in printed(tmp_path, 80)


def test_extensions_are_curves_of_their_own(results):
    known, rows = load(results)
    curves = summary.summarise(rows, known)
    label = "rope scheme.base=100"
    assert curve_of(curves, label, "yarn")["aulc"] == 1
    assert curve_of(curves, label)["aulc"] < 1
    assert curve_of(curves, label, "yarn")["n_started"] == 1


def test_runs_without_evaluation_are_counted(results):
    known, rows = load(results)
    cope = curve_of(summary.summarise(rows, known), "cope")
    assert (cope["n_started"], cope["n_finished"], cope["n_evaluated"]) == (1, 0, 0)
    assert math.isnan(cope["performs_to"])


@pytest.mark.parametrize("fmt", report.FORMATS)
def test_only_runs_without_evaluation(tmp_path, fmt, capsys):
    make_run(tmp_path, "cope", {}, status="running", converged=None)
    assert "cope" in exported(tmp_path, fmt)
    assert "none of these runs is evaluated yet: `posx eval` does it" in capsys.readouterr().err


# -- the printed tables --------------------------------------------------------------------------


def body_lines(text, title):
    """The lines of all printed tables whose title starts with `title`."""
    blocks = [block for block in text.split("\n\n") if block.startswith(title)]
    assert blocks
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("table", ["token_acc by length", "summary"])
def test_every_curve_is_in_every_part_of_a_table(results, width, table):
    text = printed(results, width)
    parts = [part for part in text.split("\n\n") if part.startswith(f"copy, train_len 64: {table}")]
    assert (len(parts) == 1) == (width == 200)
    names = ["rope", "rope scheme.base=100", "rope scheme.base=100 + yarn", "learned", "nope"]
    names += ["hard_alibi scheme.window=16", "cope"]
    for part in parts:
        starts = [line.split("  ")[0] for line in part.splitlines()]
        for name in names:
            # the long label may go on after its first word group, on the same line or the next
            assert any(start == name or start.startswith(f"{name} ") for start in starts), name
        assert "scheme.a_very_long_parameter_name_of_a_user=0.125" in part
        assert max(map(len, part.splitlines())) <= width


@pytest.mark.parametrize("width", [20, 80, 200])
def test_every_length_and_number_is_printed_once(results, width):
    lines = body_lines(printed(results, width), "copy, train_len 64: token_acc")
    heads = [line for line in lines if line.startswith("length")]
    found = [word for line in heads for word in line.split() if word.isdigit()]
    assert found == [str(length) for length in LENGTHS]
    text = "\n".join(lines)
    _, rows = load(results)
    copies = summary.cells(rows).query("task == 'copy'")
    for mark, verdict in (("P", "performs"), ("D", "degrades"), ("F", "fails"), ("U", "untrained")):
        here = copies[copies["verdict"] == verdict]
        marks = [word for word in text.split() if word.split("/")[0] == mark]
        assert len(marks) == len(here) > 0
    assert text.split().count("X") == 5
    assert text.split().count("-") == 6  # cope was not evaluated at any of the six lengths


def test_numbers_chance_and_multiples_are_printed(results):
    lines = body_lines(printed(results, 200), "copy, train_len 64: token_acc")
    assert lines[2].split()[2:] == ["1x", "1.125x", "1.5x", "2x", "4x", "8x"]
    assert lines[3].split()[:2] == ["chance", "0.133"]
    (at,) = [i for i, line in enumerate(lines) if line.startswith("rope  ")]
    assert "0.900 D" in lines[at]
    assert "0.84-0.96" in lines[at + 1]
    untrained = [line for line in lines if "nope (untrained: 1 of 2 seeds)" in line]
    assert untrained[0].count("0.600 U") == 6


def test_one_seed_has_no_second_line(tmp_path):
    make_run(tmp_path, "alibi", flat(1.0))
    make_run(tmp_path, "learned", {64: 1.0, **dict.fromkeys(LENGTHS[1:])})
    text = printed(tmp_path, 200)
    lines = body_lines(text, "copy, train_len 64: token_acc")[5:]
    assert lines[0].split() == ["alibi", *["1.000", "P"] * 6]
    assert lines[1].split() == ["learned", "1.000", "P", *"XXXXX"]
    assert lines[2].split() == ["out", "of"] * 5  # a reason is no spread
    assert "n/a" not in "".join(lines)
    assert text.count("one seed has no spread") == 1
    lines = body_lines(text, "copy, train_len 64: summary")[4:]
    assert " ".join(lines[0].split()) == "alibi >=512 >=512 >=512 8x 1.000 1/1/1 1000"
    assert " ".join(lines[1].split()) == "learned 64 64 64 1x 0.028 1/1/1 1000"
    assert "1.000 P (n/a)" in exported(tmp_path, "md")


def test_a_row_of_several_seeds_keeps_na_where_only_one_computes(tmp_path):
    make_run(tmp_path, "alibi", flat(1.0), seed=0)
    make_run(tmp_path, "alibi", {**flat(1.0), 512: None}, seed=1)
    lines = body_lines(printed(tmp_path, 200), "copy, train_len 64: token_acc")
    assert lines[-1].split() == ["1.00-1.00"] * 5 + ["n/a"]


@pytest.mark.parametrize(("width", "word", "parts"), [(80, 30, 2), (80, 38, 2), (100, 28, 1)])
def test_the_summary_is_in_few_tables(tmp_path, width, word, parts):
    at = (64, 1024, 2048, 4096, 8192)
    label = f"rope scheme.{'x' * (word - 9)}=1 scheme.b=2 scheme.c=3"
    for seed, acc in enumerate((0.0, 1.0)):
        accs = {**dict.fromkeys(at, 1.0), 8192: acc}
        make_run(tmp_path, "rope", accs, seed=seed, label=label, steps=10_000 * (seed + 1))
    text = printed(tmp_path, width)
    blocks = [block for block in text.split("\n\n") if block.startswith("copy, train_len 64: summ")]
    assert len(blocks) == parts
    assert max(len(line) for block in blocks for line in block.splitlines()) <= width
    found = " ".join(blocks)
    for value in (">=8192", "4096", "4390-8192", "64x", "2/2/2", "10000-20000"):
        assert value in found.split(), value


def test_notes_fit_on_a_terminal(results):
    text = printed(results, 80)
    for line in (*LEGEND, *SUMMARY_LEGEND, *CAVEAT):
        assert line in text.splitlines()  # not wrapped


def test_rows_are_in_the_order_of_aulc_within_a_task(results):
    lines = body_lines(printed(results, 200), "copy, train_len 64: summary")
    order = [line.split()[0] for line in lines[4:] if line[:1].isalpha()]
    assert order == ["hard_alibi", "rope", "rope", "nope", "rope", "learned", "cope"]


def test_the_status_of_a_failure_and_the_failed_runs_are_printed(results):
    text = printed(results, 40)  # narrower than the lines about runs, which must not be broken
    assert "out of" in text
    lines = text.splitlines()
    failed = [
        line for line in lines if line.startswith("failed, not evaluated: runs/copy/nope/seed2")
    ]
    assert len(failed) == 1
    assert failed[0].endswith(": loss is NaN")
    assert any(line.startswith("interrupted, not evaluated: runs/copy/cope") for line in lines)


def test_the_report_says_once_what_it_is_not(results):
    text = printed(results, 300)
    assert text.count("mechanism study of tiny models") == 1
    assert text.count("P: performs") == 1


def test_a_name_wider_than_the_console_is_whole(results):
    text = printed(results, 30)
    parts = body_lines(text, "copy")
    assert "scheme.a_very_long_parameter_name_of_a_user=0.125" in "\n".join(parts)


def test_columns_are_dealt_evenly():
    assert render._pages([9] * 9, 60) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert render._pages([9] * 6, 60) == [[0, 1, 2], [3, 4, 5]]
    assert render._pages([9, 9], 60) == [[0, 1]]
    assert render._pages([50, 50], 20) == [[0], [1]]
    # an even split would not fit the first page here
    assert render._pages([40, 5, 5, 5, 5, 40], 60) == [[0, 1, 2], [3, 4, 5]]
    assert render._pages([], 60) == []


def test_no_colour_when_piped_and_colour_on_a_terminal(results):
    assert "\x1b" not in printed(results, 80)
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    report.report(runs_of(results), results, console=console)
    assert "\x1b[32m" in file.getvalue()


def test_no_color_is_heard_on_a_terminal(results, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    report.report(runs_of(results), results, console=console)
    assert "\x1b[32m" not in file.getvalue()
    assert "1.000 P" in file.getvalue()


SCRIPT = """
import sys
from pathlib import Path
from posx import report
from posx.runs import find
root = Path(sys.argv[1])
for fmt in report.FORMATS:
    print("=====", fmt, flush=True)
    report.report(find(root)[0], root, fmt=fmt)
    sys.stdout.flush()
loaded = {"torch", "hydra", "omegaconf", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_encoding_of_the_stream(tmp_path, encoding):
    make_run(tmp_path, "rope", flat(1.0), label="rope 位置\x1b[31m")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    parts = done.stdout.decode(encoding).split("===== ")[1:]
    texts = {part.split()[0]: part for part in parts}
    assert set(texts) == set(report.FORMATS)
    for fmt, text in texts.items():
        plain = fmt == "json" or encoding != "utf-8"
        assert ("\\u4f4d" if plain else "位置") in text, fmt
    assert "\x1b" not in texts["table"]


def test_markup_in_a_label_is_text(tmp_path):
    make_run(tmp_path, "rope", flat(1.0), label="rope [red]a[/red] [/]")
    assert "rope [red]a[/red] [/]" in printed(tmp_path, 80)


# -- runs that cannot be read --------------------------------------------------------------------


def damage(run, how):
    path = run.folder / "eval.csv"
    text = path.read_text()
    changed = {
        "cut within a row": text[: len(text) * 2 // 3],
        "more fields": text + "1,2\n" + "," * 99 + "\n",
        "another header": text.replace("token_acc,", "accuracy,", 1),
        "no text": "\0" * 100,
        "empty": "",
        "another verdict": text.replace("performs", "great"),
        "words for numbers": text.replace(",100,", ",many,"),
    }
    path.write_text(changed[how])


DAMAGES = ["cut within a row", "more fields", "another header", "no text", "empty"]
DAMAGES += ["another verdict", "words for numbers"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_that_cannot_be_read_is_named_and_left_out(tmp_path, how, capsys):
    make_run(tmp_path, "alibi", flat(1.0))
    broken = make_run(tmp_path, "rope", flat(0.99))
    damage(broken, how)
    text = printed(tmp_path, 60)
    folder = broken.folder.relative_to(tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("left out: ")]
    assert line.startswith(f"left out: {folder}/")
    assert not any(line.startswith("rope ") for line in text.splitlines())
    assert any(line.startswith("alibi ") for line in text.splitlines())
    assert str(folder) in exported(tmp_path, "md").replace("\\", "")
    assert capsys.readouterr().err == ""
    assert set(pd.read_csv(io.StringIO(exported(tmp_path, "csv")))["label"]) == {"alibi"}
    assert f"left out: {folder}" in capsys.readouterr().err


@pytest.mark.parametrize("how", DAMAGES)
def test_no_run_can_be_read(tmp_path, how):
    damage(make_run(tmp_path, "rope", flat(0.99)), how)
    with pytest.raises(UserError, match="no run can be read: "):
        printed(tmp_path, 80)


def test_a_broken_run_of_another_task_is_not_read(tmp_path):
    make_run(tmp_path, "alibi", flat(1.0))
    damage(make_run(tmp_path, "alibi", flat(1.0), task="sort"), "empty")
    assert "left out: " not in printed(tmp_path, 80, tasks=["copy"])


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    folder = str(make_run(tmp_path, "alibi", flat(1.0)).folder)
    assert len(collect(choose([folder, f"{folder}/"], tmp_path), tmp_path).runs) == 1


# -- metrics and filters -------------------------------------------------------------------------


def test_another_metric(results):
    text = printed(results, 200, metric="tokens_per_s")
    lines = body_lines(text, "copy, train_len 64: tokens_per_s")
    assert "1234 P" in "\n".join(lines)
    assert not any(line.startswith("chance") for line in lines)


def test_an_unknown_metric_names_the_nearest(results):
    with pytest.raises(UserError, match=r"unknown metric token_ac .did you mean .token_acc"):
        printed(results, 80, metric="token_ac")
    with pytest.raises(UserError, match="unknown metric verdict"):
        printed(results, 80, metric="verdict")


def test_a_metric_that_was_not_evaluated(results):
    with pytest.raises(UserError, match="no evaluation here has a generated_acc; there is token_"):
        printed(results, 80, metric="generated_acc")


def test_every_metric_is_a_column_with_a_meaning():
    assert set(METRICS) < set(EVAL_COLUMNS)
    assert {"token_acc", "exact_match", "first_error", "seconds", "acc_out"} < set(METRICS)


def test_filters(results):
    text = printed(results, 200, tasks=["sort"], schemes=["rope"])
    assert "sort, train_len 64" in text
    assert "copy, train_len" not in text
    text = printed(results, 200, schemes=["learned", "rope scheme.base=100"])
    names = {line.split()[0] for line in body_lines(text, "copy, train_len 64: summ")[4:]}
    assert names == {"learned", "rope"}
    assert not any(line.startswith("rope  ") for line in text.splitlines())


def test_filters_without_a_match_say_what_exists(results):
    with pytest.raises(UserError, match=r"unknown task cop .did you mean .copy.*copy, sort"):
        printed(results, 80, tasks=["cop"])
    with pytest.raises(UserError, match="unknown scheme zzz; there is cope, hard_alibi"):
        printed(results, 80, schemes=["zzz"])
    with pytest.raises(UserError, match="no run of task sort with scheme nope; there is copy with"):
        printed(results, 80, tasks=["sort"], schemes=["nope"])


def test_no_runs(tmp_path):
    with pytest.raises(UserError, match=r"no runs in .*: train one with `posx train scheme=rope`"):
        report.report({}, tmp_path)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["csv", "json"])
def test_long_formats_load_with_pandas(results, fmt):
    text = exported(results, fmt)
    table = pd.read_csv(io.StringIO(text)) if fmt == "csv" else pd.DataFrame(json.loads(text))
    known, rows = load(results)
    assert table["n_seeds"].sum() == N_ROWS
    assert set(table["label"]) == set(known["label"])
    assert set(table["extension"]) == {"none", "yarn"}
    # one row a length; two for nope, trained and not; one for cope without a length
    assert len(table) == len(summary.cells(rows)) + 1
    rope = table[(table["label"] == "rope") & (table["task"] == "copy") & (table["length"] == 128)]
    (rope,) = rope.to_dict("records")
    assert (rope["metric"], rope["mean"], rope["performs_to"]) == (
        "token_acc",
        pytest.approx(0.90),
        96,
    )
    assert (rope["verdict"], rope["verdict_worst"]) == ("degrades", "degrades")
    assert rope["folders"].count("runs/copy/rope/seed") == 3
    single = table[table["n_seeds"] == 1]
    assert single["min"].isna().all()


def test_json_has_null_and_no_nan(results):
    text = exported(results, "json")
    assert "NaN" not in text
    (cope,) = [row for row in json.loads(text) if row["label"] == "cope"]
    assert cope["length"] is None
    assert cope["aulc"] is None


def test_markdown_has_whole_rows_and_escapes(results, tmp_path):
    root = shutil.copytree(results, tmp_path / "more")
    make_run(root, "cope", flat(1.0), seed=5, label="cope a|b*c")
    lines = exported(root, "md").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    bars = {line.replace("\\|", "").count("|") for line in tables}
    assert bars == {7 + 1, 8 + 1, 4 + 1}  # copy by length, the two summaries, sort by length
    assert any(line.startswith(r"| cope a\|b\*c | 1.000 P (n/a) |") for line in tables)
    assert any(line.startswith("| rope | 1.000 P (1.00-1.00) |") for line in tables)


def test_latex_is_balanced_and_escaped(tmp_path):
    make_run(tmp_path, "t5_bias", flat(1.0), label=r"t5_bias a&b 50% [x] $\y")
    text = exported(tmp_path, "latex")
    assert r"t5\_bias a\&b 50\% {[}x] \$\textbackslash{}y & " in text
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"):
        assert text.count(rule) == 2
    rows = [line for line in text.splitlines() if line.startswith(r"t5\_bias")]
    plain = [line.replace(r"\&", "") for line in rows]
    assert [line.count("&") for line in plain] == [6, 7]
    assert text.count("{") == text.count("}")


def test_html_escapes_every_string(tmp_path):
    make_run(tmp_path, "rope", {}, label="<b>", status="failed", reason="<script>alert(1)</script>")
    make_run(tmp_path, "rope", flat(1.0), seed=1, label='<i x="y">')
    text = exported(tmp_path, "html")
    assert "&lt;script&gt;" in text
    assert "&lt;i x=&quot;y&quot;&gt;" in text
    assert "<script" not in text
    assert "<i " not in text
    assert text.count("<tr>") == text.count("</tr>") == 2 * (1 + 2)


@pytest.mark.parametrize("fmt", report.FORMATS)
def test_output_to_a_file_is_what_is_printed(results, tmp_path, fmt):
    target = tmp_path / "out"
    file = io.StringIO()
    console = Console(file=file, width=90)
    written = report.report(runs_of(results), results, fmt=fmt, output=target, console=console)
    assert written == [target]
    assert file.getvalue() == ""
    assert target.read_text("utf-8") == printed(results, 90, fmt=fmt)


def test_output_into_a_missing_folder(results, tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        exported(results, "csv", output=tmp_path / "missing" / "x.csv")


def test_an_unknown_format(results):
    with pytest.raises(UserError, match=r"unknown format latx .did you mean .latex"):
        exported(results, "latx")


# -- the picture ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "magic"),
    [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("SVG", b"<?xml")],
)
def test_plot_files(results, tmp_path, suffix, magic):
    target = tmp_path / f"curves.{suffix}"
    written = report.report(
        runs_of(results), results, plot=target, console=Console(file=io.StringIO())
    )
    assert written == [target]
    assert target.read_bytes().startswith(magic)


def test_plot_has_every_curve_by_name(results, tmp_path):
    root = shutil.copytree(results, tmp_path / "more")
    make_run(root, "rope", flat(0.97), label="rope a$b$c")
    data = collect(runs_of(root), root)
    plot.draw(data, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text("utf-8")  # letters are paths, with the text beside
    names = ["rope", "rope scheme.base=100", "rope scheme.base=100 +", "learned", "nope", "alibi"]
    names += ["nope (untrained)", "hard_alibi scheme.window=16", "rope a", "chance"]
    names += ["copy, train_len 64", "sort, train_len 64"]
    missing = [name for name in names if f"<!-- {name}" not in text]
    assert missing == ["alibi"]  # which no run here has


def test_a_plot_of_another_metric(results, tmp_path):
    data = collect(runs_of(results), results)
    plot.draw(data, tmp_path / "a.svg", "peak_mb")
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert "<!-- peak_mb -->" in text
    assert "<!-- chance -->" not in text


def test_a_plot_with_another_suffix(results, tmp_path):
    with pytest.raises(UserError, match=r"must end in .png, .svg, .pdf"):
        printed(results, 80, plot=tmp_path / "curves.gif")


def test_a_plot_without_matplotlib(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"needs matplotlib: pip install 'posx\[plot\]'"):
        printed(results, 80, plot=tmp_path / "curves.png")


def test_a_plot_of_nothing(tmp_path):
    make_run(tmp_path, "cope", {}, status="running")
    with pytest.raises(UserError, match="nothing to draw"):
        printed(tmp_path, 80, plot=tmp_path / "curves.png")


def test_one_configuration_is_one_row_however_its_command_was_written(tmp_path):
    """The second command spells out a default, so its label is longer; the group is the same."""
    for seed, label in enumerate(("rope", "rope scheme.base=10000")):
        make_run(tmp_path, "rope", {64: 1.0, 128: 0.5}, seed=seed, group="one", label=label)
    data = collect(find(tmp_path)[0], tmp_path)
    table = summary.summarise(summary.evaluations(data, "token_acc"), data.runs)
    assert list(table["label"]) == ["rope"]
    assert list(table["n_started"]) == [2]


def test_cells_of_other_sequences_are_said(tmp_path):
    for seed in (0, 1):
        run = make_run(tmp_path, "rope", {64: 1.0, 128: 0.5}, seed=seed)
    data = collect(find(tmp_path)[0], tmp_path)
    assert loose_ends(data) == []
    table = run.table("eval")
    table.loc[table["length"] == 128, "eval_seed"] = 1
    run.write_table("eval", table)
    (sentence,) = loose_ends(collect(find(tmp_path)[0], tmp_path))
    assert sentence.startswith("copy at 128 tokens: not all cells are of the same sequences")
