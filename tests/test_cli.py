"""What the commands print, on any terminal, and schemes that lie outside the package."""

import csv
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import QUICK, run_posx
from test_report import make_run
from typer.testing import CliRunner

from posx import catalog
from posx.cli import app
from posx.display import print_rows
from posx.schemes.base import Maker, Site

VERBS = ["train", "eval", "report", "list", "show", "check"]
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm"}  # Rich then folds to COLUMNS and sets styles


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def run_of(folder: Path, scheme: str) -> str:
    (found,) = (folder / "results" / "runs" / "copy" / scheme).iterdir()
    return str(found.relative_to(folder))


# -- help ------------------------------------------------------------------------------------------


def test_help_shows_every_verb_in_full(tmp_path: Path) -> None:
    done = run_posx(tmp_path, "--help", COLUMNS="80")
    commands = done.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in commands] == VERBS
    assert all(line.endswith(".") and "..." not in line for line in commands)
    assert run_posx(tmp_path, COLUMNS="80").stdout == done.stdout
    assert run_posx(tmp_path, "-h", COLUMNS="80").stdout == done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_a_line(verb: str, tmp_path: Path) -> None:
    shown = run_posx(tmp_path, verb, "--help", COLUMNS="80").stdout
    examples = [line for line in shown.splitlines() if line.startswith(f"  posx {verb}")]
    assert len(examples) >= 2
    assert not any(" posx " in line.strip() or "|" in line for line in examples)
    assert max(map(len, shown.splitlines())) <= 80


def test_version(tmp_path: Path) -> None:
    assert run_posx(tmp_path, "--version").stdout == f"{version('posx')}\n"


# -- lists and cards -------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["scheme", "extension", "task", "model", "optim"])
def test_piped_list_is_a_line_a_name(group: str, tmp_path: Path) -> None:
    files = catalog.files(group)
    names, *lines = run_posx(tmp_path, "list", group, COLUMNS="20").stdout.splitlines()
    assert names.split()[0] == "name"
    assert [line.split()[0] for line in lines] == list(files)
    for line, path in zip(lines, files.values(), strict=True):
        assert line.endswith(catalog.card(path))  # not cut, no blanks at the end


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("words", ["list scheme", "list run", "show RUN", "show scheme=rope"])
def test_a_terminal_cuts_no_word(words: str, columns: str, trained: Path) -> None:
    run = run_of(trained, "rope")
    command = words.replace("RUN", run).split()
    piped = run_posx(trained, *command).stdout
    shown = run_posx(trained, *command, COLUMNS=columns, **TERMINAL).stdout
    assert "\x1b[1m" in shown
    assert "\x1b" not in run_posx(trained, *command, NO_COLOR="1").stdout
    piped = piped.partition("Untrained")[0]  # the picture of a scheme follows the width
    missing = set(piped.split()) - set(plain(shown).split()) - set(piped.splitlines()[0].split())
    if words == "show RUN":  # what has no room there is named, and its values left out
        missing = {word for word in missing if not re.match(r"[\d.e+-]+$", word)}
        missing -= {"sdpa", "dense", "folded", "strips", "plain", "causal"}
    assert not {word for word in missing if len(word) > 1}
    if words.startswith("list"):
        too_wide = [line for line in plain(shown).splitlines() if len(line) > int(columns)]
        assert all(len(line.split()) <= 2 for line in too_wide)  # a single long word at most


def test_schemes_are_chosen_by_their_facts(tmp_path: Path) -> None:
    def names(*words: str) -> set[str]:
        lines = run_posx(tmp_path, "list", "scheme", *words).stdout.splitlines()[1:]
        return {line.split()[0] for line in lines}

    assert {"alibi", "t5"} <= names("family=bias")
    assert names("family=bias", "trainable=no") == names("family=bias") - names("trainable=yes")
    assert {"alibi", "rope"} <= names("year=2021")
    assert names("year=2017,2018") == names("year=2017") | names("year=2018")
    assert "sinusoidal" not in names("relative=yes")
    for words, said in (
        (["famil=bias"], "did you mean 'family'?"),
        (["alibi"], "cannot choose schemes by 'alibi'"),
        (["family=bia"], "no scheme has family=bia (did you mean 'bias'?)"),
        (["family=bias", "enters=mask"], "no scheme has family=bias and enters=mask"),
    ):
        done = run_posx(tmp_path, "list", "scheme", *words, code=2)
        (line,) = done.stderr.splitlines()
        assert said in line


def test_lists_in_other_formats(tmp_path: Path) -> None:
    found = csv.DictReader(
        run_posx(tmp_path, "list", "task", "--format", "csv").stdout.splitlines()
    )
    assert [row["name"] for row in found] == list(catalog.files("task"))
    lines = run_posx(tmp_path, "list", "task", "--format", "md").stdout.splitlines()
    assert lines[:2] == ["| name | card |", "| --- | --- |"]
    done = run_posx(tmp_path, "list", "task", "--format", "html", code=2)
    assert done.stderr == "posx: --format html is not known: use table, csv, md\n"


def test_lists_are_sorted(tmp_path: Path) -> None:
    accuracies = {"rope": (0.9, 1.0), "alibi": (0.05, 0.9)}
    for scheme, values in accuracies.items():
        for seed, acc in enumerate(values):
            steps = 10 ** (seed + 2)
            found = {"check": {"token_acc": acc}, "steps": steps}
            make_run(tmp_path, scheme, {}, seed=seed, **found)
    make_run(tmp_path, "nope", {}, status="failed")

    def order(keys: str) -> list[tuple[str, ...]]:
        words = ("list", "run", "--results-dir", str(tmp_path), "--sort", keys, "--format", "csv")
        rows = csv.DictReader(run_posx(tmp_path, *words).stdout.splitlines())
        return [(row["scheme"], row["seed"]) for row in rows]

    rope, alibi, nope = (
        [("rope", "0"), ("rope", "1")],
        [("alibi", "0"), ("alibi", "1")],
        ("nope", "0"),
    )
    assert order("-accuracy") == [
        rope[1],
        alibi[1],
        rope[0],
        alibi[0],
        nope,
    ]  # equal ones as before
    assert order("accuracy") == [alibi[0], alibi[1], rope[0], rope[1], nope]
    assert order("-scheme,steps") == [*rope, nope, *alibi]
    assert order("steps,-seed")[:2] == [alibi[0], rope[0]]
    done = run_posx(tmp_path, "list", "task", "--sort", "names", code=2)
    assert done.stderr == "posx: cannot sort by 'names' (did you mean 'name'?): use name, card\n"


def test_costs_are_listed_beside_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posx import cost

    def measure(self: cost.Meter, make: Maker) -> cost.Cost:
        limited = make(Site(64, 2, 32, 64)).max_len is not None
        return cost.Cost(1.0, None, None) if limited else cost.Cost(1.25, 2.5, 34.4)

    monkeypatch.setattr(cost.Meter, "measure", measure)
    done = run_posx(tmp_path, "list", "scheme", "--cost", "year=2017")
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert ["learned", "1.00x", "beyond its limit", "beyond its limit"] in rows
    assert ["sinusoidal", "1.25x", "2.50x", "34 MiB"] in rows
    assert "--cost measures schemes" in run_posx(tmp_path, "list", "task", "--cost", code=2).stderr


def test_show_draws_a_scheme(tmp_path: Path) -> None:
    done = run_posx(tmp_path, "show", "scheme=alibi", "--plot", "alibi.png")
    assert "score against that of the own key, over the distance in tokens." in done.stdout
    assert (tmp_path / "alibi.png").read_bytes().startswith(b"\x89PNG")
    done = run_posx(tmp_path, "show", "task=copy", "--plot", "copy.png", code=2)
    assert done.stderr == "posx: --plot draws a scheme: write scheme=NAME, not task=copy\n"


def test_check_under_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posx import conformance

    def limit(subject: conformance.Subject) -> None:
        """not that of the trained table"""
        assert subject.scheme().max_len != conformance.TRAIN_LEN

    monkeypatch.setattr(conformance, "CHECKS", (limit,))
    done = run_posx(tmp_path, "check", "scheme=learned", "extension=interpolate")
    assert "learned + interpolate" in done.stdout
    assert "sinusoidal" not in run_posx(tmp_path, "check", "extension=clip").stdout
    done = run_posx(tmp_path, "check", "extension=clip", "scheme=rope", code=2)
    assert "extension clip changes Learned, not rope" in done.stderr
    for words in (["task=copy"], ["scheme=rope", "alibi"]):
        done = run_posx(tmp_path, "check", *words, code=2)
        assert "write scheme=NAME, extension=NAME, both, or nothing" in done.stderr


def test_rows_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"name": "rope", "enters": "q/k", "card": "turns queries and keys"},
        {"name": "alibi", "enters": "score", "card": ""},
    ]
    for key, value in TERMINAL.items():
        monkeypatch.setenv(key, value)

    def shown(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_rows(rows, below=("card",))
        return plain(capsys.readouterr().out)

    assert shown(40) == (
        "name   enters  card\nrope   q/k     turns queries and keys\nalibi  score\n"
    )
    assert shown(24) == (
        "name   enters\nrope   q/k\n    turns queries and\n    keys\nalibi  score\n"
    )
    assert [line.split() for line in shown(10).splitlines()] == [
        ["rope"],
        ["enters", "q/k"],
        ["card", "turns"],
        *(["queries"], ["and"], ["keys"]),
        ["alibi"],
        ["enters", "score"],
    ]


@pytest.mark.parametrize("word", ["scheme=rope", "extension=yarn", "task=copy", "model=tiny"])
def test_card(word: str, tmp_path: Path) -> None:
    group, _, name = word.partition("=")
    path = catalog.files(group)[name]
    shown = run_posx(tmp_path, "show", word).stdout
    assert shown.startswith(f"{word}\n{catalog.card(path)}\n")
    for line in path.read_text().splitlines()[1:]:
        assert line in shown
    if group == "scheme":
        assert "arXiv:2104.09864" in shown
        assert re.search(r"^hooks +prepare$", shown, re.MULTILINE)
        assert re.search(r"^limit +none$", shown, re.MULTILINE)


def test_a_run_shows_what_its_columns_mean(trained: Path) -> None:
    shown = run_posx(trained, "show", run_of(trained, "learned")).stdout
    assert re.search(r"^status +finished$", shown, re.MULTILINE)
    assert re.search(r"^converged +no$", shown, re.MULTILINE)
    assert "_target_: posx.schemes.absolute.Learned" in shown
    assert re.search(r"^  grad_norm +mean gradient norm before clipping", shown, re.MULTILINE)


def test_narrow_run_names_what_it_leaves_out(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "results", tmp_path / "results")
    run_posx(tmp_path, "eval", "scheme=learned", "--lengths", "16,24")
    run = run_of(tmp_path, "learned")
    shown = plain(run_posx(tmp_path, "show", run, COLUMNS="80", **TERMINAL).stdout)
    (names,) = [line for line in shown.splitlines() if line.startswith("extension  length")]
    assert "verdict" in names
    assert "attention_entropy" not in names
    assert "No room for " in shown
    assert "24 tokens" in shown  # the reason why it does not compute


def test_ascii_terminal(tmp_path: Path) -> None:
    (tmp_path / "mine" / "scheme").mkdir(parents=True)
    card = "# Müller: θ turns → everything\n_target_: posx.schemes.base.Nope\n"
    (tmp_path / "mine" / "scheme" / "mine.yaml").write_text(card, "utf-8")
    extra = ["--config-dir", str(tmp_path / "mine")]
    for words in (["list", "scheme"], ["show", "scheme=mine"]):
        done = CliRunner(charset="ascii").invoke(app, [*words, *extra])
        assert done.exit_code == 0, done.exception
        assert "M?ller: ? turns ? everything" in done.stdout


# -- pipes -----------------------------------------------------------------------------------------


def posx_process(folder: Path, *words: str, stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "posx", *words],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("words", ["list task", "--help", "train --cfg job"])
def test_reader_that_leaves_is_no_error(words: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = posx_process(tmp_path, *words.split(), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["list task", "--help", "train --cfg job"])
def test_output_that_cannot_be_written_is_said(words: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = posx_process(tmp_path, *words.split(), stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == "posx: cannot write the output (No space left on device)\n"


def test_the_command_leaves_no_hydra_behind(tmp_path: Path) -> None:
    before = (sys.argv, os.environ.get("HYDRA_FULL_ERROR"))
    run_posx(tmp_path, "train", "scheme=ropee", code=2)
    run_posx(tmp_path, "train", "--cfg", "job")
    assert (sys.argv, os.environ.get("HYDRA_FULL_ERROR")) == before


def test_cfg_prints_the_config(tmp_path: Path) -> None:
    shown = run_posx(tmp_path, "train", "seed=7", "--cfg", "job", "scheme=alibi").stdout
    assert "\nseed: 7\n" in shown
    assert "posx.schemes.bias.Alibi" in shown


def test_app_is_a_command() -> None:
    with pytest.raises(SystemExit) as ended:
        app(["--version"])
    assert ended.value.code == 0


# -- schemes of third parties ----------------------------------------------------------------------

MODULE = '''
import torch
from posx.schemes.base import Scheme


class Mine(Scheme):
    """A penalty on distance, the same for all heads (https://example.org/mine)."""

    enters = "score"
    relative = True

    def __init__(self, site, slope: float = 0.5):
        super().__init__(site)
        self.slope = slope

    def distance_bias(self, d):
        return -self.slope * d.expand(self.site.n_heads, *d.shape)


class Leaks(Scheme):
    """Looks ahead (https://example.org/leaks)."""

    enters = "input"

    def embed(self, x, pos):
        return x + x.mean(1, keepdim=True)


class Unmade(Scheme):
    """Cannot be made (https://example.org/unmade)."""

    def __init__(self, site):
        raise RuntimeError("not today")
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of three schemes, and one with a yaml for each."""
    (tmp_path / "mine_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_module", raising=False)
    folder = tmp_path / "mine" / "scheme"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# Mine: a penalty on distance\n_target_: mine_module.Mine\nslope: 0.5\n"
    )
    (folder / "leaks.yaml").write_text("# Leaks: looks ahead\n_target_: mine_module.Leaks\n")
    (folder / "unmade.yaml").write_text("# Unmade\n_target_: mine_module.Unmade\n")
    return tmp_path


def test_their_scheme_trains_and_is_evaluated(mine: Path) -> None:
    run_posx(mine, "train", "scheme=mine", "--config-dir", "mine", *QUICK)
    search = f"hydra.searchpath=[file://{mine / 'mine'}]"
    again = run_posx(mine, "train", "scheme=mine", search, *QUICK)
    assert "already trained" in again.stderr
    untrusted = run_posx(mine, "eval", "--lengths", "16", code=2).stderr
    assert "--trust mine_module" in untrusted
    assert len(untrusted.splitlines()) == 1
    run_posx(mine, "eval", "--lengths", "16", "--trust", "mine_module")
    assert "mine" in run_posx(mine, "report", "--format", "csv").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scheme=mien"], "did you mean 'mine'?"),
        (["scheme=mine", "scheme.slpoe=1"], "did you mean 'scheme.slope'?"),
        (["scheme=mine", "+scheme.base=1"], "no key 'base' in mine; there are: slope"),
        (["scheme=mine", "scheme.slope=steep"], "mine: slope=steep must be a number"),
    ],
)
@pytest.mark.parametrize("way", ["flag", "search"])
def test_their_names_are_known(words: list[str], said: str, way: str, mine: Path) -> None:
    place = {
        "flag": ["--config-dir", "mine"],
        "search": [f"hydra.searchpath=[file://{mine / 'mine'}]"],
    }[way]
    (line,) = run_posx(mine, "train", *words, *place, *QUICK, code=2).stderr.splitlines()
    assert said in line


def test_their_module_must_be_importable(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(mine)])
    for words in (["train", "scheme=mine", *QUICK], ["show", "scheme=mine"]):
        done = run_posx(mine, *words, "--config-dir", "mine", code=2)
        (line,) = done.stderr.splitlines()
        assert "cannot import mine_module.Mine" in line
        assert "PYTHONPATH" in line


def test_their_scheme_is_shown(mine: Path) -> None:
    (mine / "mine" / "scheme" / "unmade.yaml").unlink()
    shown = run_posx(mine, "show", "scheme=mine", "--config-dir", "mine").stdout
    assert "A penalty on distance, the same for all heads" in shown
    assert re.search(r"^hooks +distance_bias$", shown, re.MULTILINE)
    listed = run_posx(mine, "list", "scheme", "--config-dir", "mine").stdout
    assert re.search(
        r"^mine +mine_module +score +yes +0 +none +Mine: a penalty", listed, re.MULTILINE
    )
    assert re.search(r"^rope ", listed, re.MULTILINE)


def test_check_passes_a_good_scheme(mine: Path) -> None:
    done = run_posx(mine, "check", "scheme=mine", "--config-dir", "mine")
    lines = done.stdout.splitlines()
    assert len(lines) > 10
    assert lines[0].split() == ["scheme", "check", "result", "what"]
    assert all(" pass " in line for line in lines[1:])
    assert done.stderr == ""


def test_check_names_what_a_broken_scheme_breaks(mine: Path) -> None:
    done = run_posx(mine, "check", "leaks", "--config-dir", "mine", code=1)
    failed = [line for line in done.stdout.splitlines() if " FAIL " in line]
    assert any(re.search(r"causal +FAIL +earlier logits: differs by", line) for line in failed)
    (line,) = done.stderr.splitlines()
    assert f"{len(failed)} checks failed: " in line
    assert "leaks: causal" in line
    assert re.search(r"shapes +pass", done.stdout)


def test_check_says_why_a_scheme_cannot_be_made(mine: Path) -> None:
    done = run_posx(mine, "check", "scheme=unmade", "--config-dir", "mine", code=2)
    (line,) = done.stderr.splitlines()
    assert "unmade" in line
    assert "not today" in line


def test_check_of_all_names_each(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posx import conformance

    def causal(subject: conformance.Subject) -> None:
        """of a scheme that does not leak"""
        assert subject.name != "leaks", "it leaks"

    monkeypatch.setattr(conformance, "CHECKS", (causal,))
    (mine / "mine" / "scheme" / "unmade.yaml").unlink()
    done = run_posx(mine, "check", "--config-dir", "mine", code=1)
    for name in catalog.files("scheme"):
        assert f"{name}: 1 of 1 checks pass" in done.stdout
    assert "leaks: 0 of 1 checks pass" in done.stdout
    assert "it leaks" in done.stdout
    assert done.stderr == "posx: 1 checks failed: leaks: causal\n"
