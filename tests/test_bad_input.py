"""What a user does wrong ends in one line: what was given, what is allowed, what to do."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from conftest import HERE, QUICK, Posx, run_posx
from safetensors.torch import load_file, save_file
from typer.testing import Result

from posx import job, runs, sweep, train


def sentence(done: Result) -> str:
    """The one line on stderr; nothing on stdout, no traceback."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("posx: ")
    return lines[0]


def refused(folder: Path, *words: str, code: int = 2, **variables: str) -> str:
    return sentence(run_posx(folder, *words, code=code, **variables))


# -- posx train ------------------------------------------------------------------------------------

TRAIN = [
    # names and keys
    ("scheme=ropee", ["no scheme named 'ropee'", "did you mean 'rope'?", "alibi, "]),
    ("scheme=RoPE", ["did you mean 'rope'?"]),
    ("scheme=null", ["no scheme named 'null'", "alibi, "]),
    ("model=big", ["no model named 'big'", "small, tiny"]),
    ("extension=yarnn", ["no extension named 'yarnn'", "did you mean 'yarn'?"]),
    ("hydra/launcher=nope", ["no hydra/launcher named 'nope'", "basic"]),
    ("schemee=rope", ["no key 'schemee'", "did you mean 'scheme'?", "--cfg job"]),
    ("train.stpes=3", ["no key 'train.stpes'", "did you mean 'train.max_steps'?"]),
    ("lr=3", ["no key 'lr'", "did you mean 'optim.lr'?"]),
    ("tarin.max_steps=3", ["did you mean 'train.max_steps'?"]),
    ("experiment=blog", ["write +experiment="]),
    ("+experiment=blgo", ["no experiment named 'blgo'", "did you mean 'blog'?", "rope_base"]),
    ("+experiment=blog", ["scheme, seed, task", "add -m"]),
    ("--jobs 0", ["--jobs", "greater than or equal to 1"]),
    ("--jobs abc", ["--jobs", "integer"]),
    ("-m hydra.launcher.jobs=0", ["hydra.launcher.jobs=0", "at least 1"]),
    ("-m hydra.launcher.jobs=abc", ["hydra.launcher.jobs=abc", "Integer"]),
    ("-m hydra.launcher.retries=-1", ["hydra.launcher.retries=-1", "at least 0"]),
    ("eval.lengths=24,48", ["eval.lengths=24,48", "eval.lengths=[24,48]"]),
    ("eval.lengths=[24,x]", ["eval.lengths '24,x'", "'x' is not a length"]),
    ("eval.lengths=[3]", ["length 3 is too short"]),
    ("eval.extensions=yarnn", ["no extension named 'yarnn'", "did you mean 'yarn'?"]),
    ("+eval.length=3", ["no key 'eval.length'", "did you mean 'lengths'?"]),
    ("eval=3", ["eval=3", "group"]),
    ("+train.foo=1", ["no key 'train.foo'", "max_steps"]),
    ("scheme.alphaa=1", ["no key 'scheme.alphaa'"]),
    ("+scheme.alphaa=1", ["no key 'alphaa' in rope", "base, rotary_dim, interleaved"]),
    ("+task.vocab.bsae=3", ["no key 'bsae' in copy.vocab", "did you mean 'base'?"]),
    ("~task", ["lacks task"]),
    # grammar
    ("rope", ["cannot read 'rope'", "write scheme=rope"]),
    ("foo", ["cannot read 'foo'", "key=value"]),
    ("train.max_steps=[1,2", ["cannot read 'train.max_steps=[1,2'", "key=[1,2]"]),
    ("=3", ["cannot read"]),
    ("train_len=64,128", ["train_len=64,128", "add -m"]),
    ("lengths=512,2048", ["no key 'lengths'", "posx eval --lengths"]),
    ("train_len=${nope}", ["train_len", "'nope' not found"]),
    # flags
    ("--lr 3", ["no flag --lr", "write optim.lr=3"]),
    ("--max-steps=3", ["no flag --max-steps", "write train.max_steps=3"]),
    ("--multirn", ["no flag --multirn", "did you mean '--multirun'?"]),
    ("--cfg bad", ["--cfg", "'bad'", "job"]),
    ("--config-dir", ["--config-dir", "expected one argument"]),
    ("--config-dir /nonexistent", ["--config-dir /nonexistent", "no such folder"]),
    # types
    ("train.max_steps=abc", ["train.max_steps=abc", "whole number"]),
    ("model.n_layers=1.5", ["model.n_layers=1.5", "whole number"]),
    ("optim.lr=fast", ["optim.lr=fast", "a number"]),
    ("train_len=abc", ["train_len=abc", "whole number"]),
    ("seed=x", ["seed=x", "whole number"]),
    ("seed=null", ["seed=null", "whole number"]),
    ("train=3", ["train=3", "group"]),
    ("scheme.base=abc", ["rope: base=abc", "a number"]),
    ("scheme.rotary_dim=2.5", ["rope: rotary_dim=2.5", "a whole number or null"]),
    ("scheme.interleaved=perhaps", ["rope: interleaved=perhaps", "true or false"]),
    ("scheme._target_=posx.nothing.There", ["cannot import posx.nothing.There", "PYTHONPATH"]),
    ("task._target_=collections.OrderedDict", ["is no posx.tasks.base.Task"]),
    # ranges
    ("seed=-1", ["seed=-1", "at least 0"]),
    ("train_len=4", ["train_len=4", "at least 5"]),
    ("model.d_head=7", ["rotary_dim 7", "even"]),
    ("model.norm=batchnorm", ["model.norm=batchnorm", "layernorm | rmsnorm"]),
    ("optim.warmup_steps=0", ["optim.warmup_steps=0", "at least 1"]),
    ("optim.lr=nan", ["optim.lr=nan"]),
    ("optim.clip=0", ["optim.clip=0", "above 0"]),
    ("optim.beta1=2", ["optim.beta1=2", "below 1"]),
    ("train.average=1", ["train.average=1", "below 1"]),
    (
        "task.vocab.base=2 task.vocab.digits=1",
        ["length 16 needs 6 unique symbols", "has 2", "task.unique=false"],
    ),
    ("device=bogus", ["device=bogus", "cuda"]),
    # other runs
    ("init=/nowhere", ["init=/nowhere", "no such folder"]),
    ("extension=yarn", ["extension=", "init=RUN", "--extend"]),
    ("results_dir=/dev/null", ["cannot write to /dev/null", "POSX_RESULTS_DIR"]),
]


@pytest.mark.parametrize(("words", "said"), TRAIN, ids=[words for words, _ in TRAIN])
def test_train_refuses(words: str, said: list[str], tmp_path: Path) -> None:
    line = refused(tmp_path, "train", *QUICK, *words.split())
    for part in said:
        assert part in line, line
    assert not list(tmp_path.rglob("run.json"))


def test_hydras_switch_gives_the_traceback(tmp_path: Path) -> None:
    for word in ("train.stpes=3", "seed=x"):
        done = run_posx(tmp_path, "train", word, code=2, HYDRA_FULL_ERROR="1")
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("posx: ")


def test_a_sweep_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ["scheme=rope,nope", "-m", "model.d_head=7,8", *QUICK, HERE]
    words.remove("model.d_head=8")
    done = run_posx(tmp_path, "train", *words, code=1)  # rope needs an even head
    assert len(list(tmp_path.rglob("model.safetensors"))) == 3
    *_, reason, command, last = done.stderr.splitlines()
    assert reason.startswith("posx: scheme=rope model.d_head=7: ")
    assert "even" in reason
    assert command.startswith("    posx train scheme=rope model.d_head=7 ")
    assert last == "posx: 1 of 4 runs failed: scheme=rope model.d_head=7"


def test_failures_in_the_processes_of_a_launcher_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SimpleNamespace(getpid=iter(range(100)).__next__)  # each job in another process
    monkeypatch.setattr(sweep, "os", elsewhere)
    words = ["train", "-m", "scheme=rope,nope", *QUICK, "model.d_head=7", HERE]
    words.remove("model.d_head=8")
    done = run_posx(tmp_path, *words, code=2)
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1  # that of nope
    assert "posx: scheme=rope: " in done.stderr
    assert "even" in done.stderr.splitlines()[-1]


def test_a_typo_stops_a_sweep_before_any_run(tmp_path: Path) -> None:
    assert "'ropee'" in refused(tmp_path, "train", "-m", "scheme=rope,ropee", *QUICK)
    assert not list(tmp_path.rglob("run.json"))


def test_ctrl_c_ends_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise train.Interrupted(2)

    monkeypatch.setattr(job, "train_run", stop)
    done = run_posx(tmp_path, "train", "-m", "seed=0,1,2", *QUICK, HERE, code=130)
    assert "SIGINT" in done.stderr
    assert len(list((tmp_path / "results" / "runs").glob("*/*/*"))) == 1


def test_a_run_that_breaks_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object) -> None:
        raise ZeroDivisionError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(train, "_step", burst)
        line = refused(tmp_path, "train", *QUICK, code=1)
    assert "ZeroDivisionError: of the test" in line
    (folder,) = (tmp_path / "results" / "runs").glob("*/*/*")
    assert "burst" in (folder / "error.txt").read_text()
    listed = run_posx(tmp_path, "list", "run").stdout
    assert "failed" in listed
    assert "of the test" in listed
    run_posx(tmp_path, "train", *QUICK)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_init_wants_a_finished_run_of_the_same_scheme(trained: Path, tmp_path: Path) -> None:
    rope = shutil.copytree(run_of(trained, "rope"), tmp_path / "rope")
    line = refused(tmp_path, "train", *QUICK, "scheme=nope", f"init={rope}")
    assert "scheme=rope" in line
    record = json.loads((rope / "run.json").read_text())
    (rope / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    line = refused(tmp_path, "train", *QUICK, f"init={rope}")
    assert "interrupted, not finished" in line


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_keeps_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "run.json"
    runs.write_text(file, "old")
    with monkeypatch.context() as patch:
        patch.setattr(*(os, "fsync") if call == "fsync" else (Path, "replace"), full)
        with pytest.raises(ValueError, match=r"No space left on device.*kept"):
            runs.write_text(file, "new")
        line = refused(tmp_path, "train", *QUICK)
    assert "cannot write" in line
    assert "No space left" in line
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.json"]


# -- which runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["eval"], ["report"], ["list", "run"]])
def test_no_runs_yet(words: list[str], tmp_path: Path) -> None:
    assert "posx train scheme=rope" in refused(tmp_path, *words)


CHOICES = [
    ("shceme=rope", ["'shceme'", "did you mean 'scheme'?", "seed, "]),
    ("scheme=ropee", ["no run has scheme=ropee", "did you mean 'rope'?", "learned, rope"]),
    ("seed=5", ["no run has seed=5", "there are: 0"]),
    ("/nowhere", ["'/nowhere' is no run folder", "posx list run"]),
    ("rope", ["'rope' is no run folder", "write scheme=rope"]),
    ("2048", ["'2048' is no run folder", "--lengths 512,2048"]),
    ("/", ["/ is not a run folder", "no run.json"]),
    ("", ["'' is no run folder"]),
]


@pytest.mark.parametrize("verb", [["eval"], ["report"], ["list", "run"]], ids=" ".join)
@pytest.mark.parametrize(("word", "said"), CHOICES, ids=[word for word, _ in CHOICES])
def test_choices_that_fit_no_run(
    verb: list[str], word: str, said: list[str], trained: Path
) -> None:
    line = refused(trained, *verb, word)
    for part in said:
        assert part in line, line


def test_a_value_that_no_run_has_is_said_beside_one_that_some_have(trained: Path) -> None:
    done = run_posx(trained, "list", "run", "scheme=rope,alibi", "converged=false")
    assert done.stderr == "posx: no run has scheme=alibi\n"
    assert len(done.stdout.splitlines()) == 2


EVAL = [
    ("--lengths 512,abc", ["'abc' is not a length", "64..8192"]),
    ("--lengths -5", ["'-5' is not a length"]),
    ("--lengths 0", ["not above 0"]),
    ("--lengths 512 2048", ["lengths stand together, as in --lengths 512,2048"]),
    ("--lengths 3", ["length 3 is too short"]),
    ("--lengths 999999", ["unique symbols", "task.unique=false"]),
    ("--extend yarnn", ["no extension named 'yarnn'", "did you mean 'yarn'?"]),
    ("--extend yarn,", ["no extension named ''"]),
    ("scheme=rope --extend clip", ["clip changes Learned, not rope", "learned"]),
    ("--sequences 0", ["--sequences", "1"]),
    ("--sequences x", ["--sequences"]),
    ("--config-dir /nonexistent", ["--config-dir", "/nonexistent"]),
    ("--bogus", ["--bogus", "posx eval --help"]),
]


@pytest.mark.parametrize(("words", "said"), EVAL, ids=[words for words, _ in EVAL])
def test_eval_refuses(words: str, said: list[str], trained: Path) -> None:
    line = refused(trained, "eval", *words.split())
    for part in said:
        assert part in line, line


REPORT = [
    ("--metric acc", ["acc", "token_acc"]),
    ("--format xls", ["xls", "csv", "latex"]),
    ("--plot x.bmp", ["x.bmp", ".png"]),
    ("--scheme ropee", ["ropee", "did you mean"]),
    ("--output /nonexistent/x", ["/nonexistent/x"]),
]


@pytest.mark.parametrize(("words", "said"), REPORT, ids=[words for words, _ in REPORT])
def test_report_refuses(words: str, said: list[str], trained: Path) -> None:
    line = refused(trained, "report", *words.split())
    for part in said:
        assert part in line, line


NAMES = [
    ("list schemes", ["'schemes'", "did you mean 'scheme'?", "run"]),
    ("list scheme foo", ["foo"]),
    ("show scheme=ropee", ["no scheme named 'ropee'", "did you mean 'rope'?"]),
    ("show schemee=rope", ["'schemee'", "did you mean 'scheme'?"]),
    ("show rope", ["write scheme=rope"]),
    ("show scheme", ["posx list scheme"]),
    ("show bogus", ["'bogus' is no run folder"]),
    ("show /", ["not a run folder"]),
    ("check scheme=ropee", ["did you mean 'rope'?"]),
    ("check task=copy", ["scheme=NAME"]),
    ("trainn", ["'trainn'", "'train'"]),
    ("--bogus", ["--bogus", "posx --help"]),
    ("list", ["GROUP", "posx list --help"]),
]


@pytest.mark.parametrize(("words", "said"), NAMES, ids=[words for words, _ in NAMES])
def test_names_that_are_not_there(words: str, said: list[str], tmp_path: Path) -> None:
    line = refused(tmp_path, *words.split())
    for part in said:
        assert part in line, line


# -- damaged run folders ---------------------------------------------------------------------------


def run_of(folder: Path, scheme: str) -> Path:
    (found,) = (folder / "results" / "runs" / "copy" / scheme).iterdir()
    return found


def copied(trained: Path, folder: Path) -> None:
    """The runs of the session in a folder of one's own, as if never evaluated."""
    not_evaluated = shutil.ignore_patterns("eval.csv")
    shutil.copytree(trained / "results", folder / "results", ignore=not_evaluated)


@pytest.fixture
def damaged(trained: Path, tmp_path: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """A folder with both runs, evaluated, where something was done to one file of rope."""

    def make(name: str, damage: Callable[[Path], object]) -> Path:
        copied(trained, tmp_path)
        run_posx(tmp_path, "eval", "--lengths", "16")
        damage(run_of(tmp_path, "rope") / name)
        return tmp_path

    return make


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])


def foreign(file: Path) -> None:
    file.write_text("a,b\n1,2\n")


def other_json(file: Path) -> None:
    file.write_text('{"schema": 1, "status": "finished"}')


@pytest.mark.parametrize(
    "damage", [cut, foreign, other_json, Path.unlink], ids=lambda f: f.__name__
)
def test_broken_record(damage: Callable[[Path], None], damaged: Callable[..., Path]) -> None:
    folder = damaged("run.json", damage)
    rope = run_of(folder, "rope")
    for verb in (["eval", str(rope)], ["report", str(rope)], ["show", str(rope)]):
        assert rope.name in refused(folder, *verb)
    listed = run_posx(folder, "list", "run")
    assert len(listed.stdout.splitlines()) == 2  # the names and the other run
    assert rope.name in listed.stderr
    assert "left out" in listed.stderr


@pytest.mark.parametrize("name", ["eval.csv", "train.csv"])
@pytest.mark.parametrize("damage", [cut, foreign], ids=lambda f: f.__name__)
def test_broken_table(
    name: str, damage: Callable[[Path], None], damaged: Callable[..., Path]
) -> None:
    folder = damaged(name, damage)
    rope = run_of(folder, "rope")
    before = (rope / name).read_bytes()
    line = refused(folder, "show", str(rope))
    assert str(rope / name) in line
    assert ("delete it" if name == "eval.csv" else "move the folder away") in line
    if name == "eval.csv":
        assert name in refused(folder, "report", "scheme=rope")
        assert rope.name in run_posx(folder, "report").stdout  # as left out
        assert name in refused(folder, "eval", "scheme=rope", code=1)
    assert (rope / name).read_bytes() == before


def test_a_table_cut_at_the_end_of_a_cell_is_noticed(damaged: Callable[..., Path]) -> None:
    def drop_cells(file: Path) -> None:
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], lines[1].rpartition(",1")[0]]))

    folder = damaged("eval.csv", drop_cells)
    assert "cut short" in refused(folder, "report", "scheme=rope")


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml"])
@pytest.mark.parametrize("damage", [cut, foreign, Path.unlink], ids=lambda f: f.__name__)
def test_broken_run(
    name: str, damage: Callable[[Path], None], damaged: Callable[..., Path]
) -> None:
    folder = damaged(name, damage)
    rope = run_of(folder, "rope")
    line = refused(folder, "eval", "scheme=rope", "--again", code=1 if "model" in name else 2)
    assert rope.name in line
    done = run_posx(folder, "eval", "--lengths", "20", code=1 if "model" in name else 0)
    assert rope.name in done.stderr
    lengths = pd.read_csv(run_of(folder, "learned") / "eval.csv")["length"]
    assert sorted(lengths) == [16, 20]  # the other run was evaluated


def test_weights_of_another_shape(damaged: Callable[..., Path]) -> None:
    def widen(file: Path) -> None:
        weights = load_file(file)
        name = next(iter(weights))
        weights[name] = torch.cat([weights[name], weights[name]])
        save_file(weights, file)

    folder = damaged("model.safetensors", widen)
    line = refused(folder, "eval", "scheme=rope", "--again", code=1)
    assert "do not fit" in line
    assert "train the run again" in line


@pytest.mark.parametrize(
    "target",
    [
        "evil.Rope",
        "posx.runs.write_text",  # of posx, but no scheme
        "posx.schemes.scaling.copy.deepcopy",  # reached through a module of posx
    ],
)
def test_code_of_strangers_is_not_run(damaged: Callable[..., Path], target: str) -> None:
    def plant(file: Path) -> None:
        file.write_text(file.read_text().replace("posx.schemes.rotary.Rope", target))

    folder = damaged("config.yaml", plant)
    line = refused(folder, "eval", "scheme=rope", "--again")
    assert f"names {target}, which is no scheme or task of posx" in line
    assert f"--trust {target.split('.')[0]}" in line


def test_beyond_the_table_is_a_row_and_no_error(posx: Posx, tmp_path: Path, trained: Path) -> None:
    copied(trained, tmp_path)
    posx("eval", "scheme=learned", "--lengths", "24")
    table = pd.read_csv(run_of(tmp_path, "learned") / "eval.csv")
    last = table.set_index("length").loc[24]
    assert (last["status"], last["verdict"]) == ("out_of_range", "cannot")
    assert "16" in last["reason"]


def test_results_in_the_way(posx: Posx, tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    line = sentence(posx("train", *QUICK, code=2))
    assert "results" in line
    assert "results_dir=" in line
    (tmp_path / "results").unlink()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs").touch()
    line = sentence(posx("train", *QUICK, code=2))
    assert "cannot write to" in line
    assert "results_dir=" in line
