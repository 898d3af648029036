"""Named grids and dry runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, QUICK, run_posx

from posx import catalog, hydra_app, job, study

EXPERIMENTS = catalog.files("experiment")


class Corners:
    """A task function that prepares jobs and keeps them."""

    def __init__(self) -> None:
        self.begun = False
        self.jobs: list[job.Job] = []

    def __call__(self, node: Any) -> None:
        self.jobs.append(job.prepare(node))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str, tmp_path: Path) -> None:
    """One job for each value of each key; all of them have cells to evaluate."""
    path = EXPERIMENTS[name]
    first = {key: values.split(",")[0] for key, values in study.grid(path).items()}
    for key, values in study.grid(path).items():
        corners = Corners()
        words = [f"{k}={v}" for k, v in first.items() if k != key] + [f"{key}={values}"]
        words += ["-m", f"+experiment={name}", HERE, f"results_dir={tmp_path}"]
        hydra_app.run(corners, "train", words)
        assert len(corners.jobs) == values.count(",") + 1
        for each in corners.jobs:
            assert each.plan is not None
            assert len(each.plan.cells) > 2
            assert each.left_out == ()
            assert "eval" not in each.label


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_card_is_the_command(name: str) -> None:
    card = catalog.card(EXPERIMENTS[name])
    assert card.endswith(f": posx train -m +experiment={name}")


def test_experiments_are_listed_with_their_size(tmp_path: Path) -> None:
    lines = run_posx(tmp_path, "list", "experiment").stdout.splitlines()
    assert {*EXPERIMENTS} >= {"blog", "rope_extension", "train_length", "rope_base"}
    assert len(lines) == len(EXPERIMENTS) + 1
    assert re.search(r"^blog +48 ", "\n".join(lines), re.M)


def test_an_experiment_of_the_user_is_run_and_narrowed(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\n# Mine\n"
        "hydra: {sweeper: {params: {scheme: 'nope,rope', seed: '0,1'}}}\n"
    )
    words = ["train", "--config-dir", "mine", "-m", "+experiment=mine", "seed=1", *QUICK, HERE]
    run_posx(tmp_path, *words)
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    assert {(each["label"].split()[0], each["seed"]) for each in records} == {
        ("nope", 1),
        ("rope", 1),
    }
    assert not any("experiment" in each["label"] for each in records)
    listed = run_posx(tmp_path, "list", "experiment", "--config-dir", "mine").stdout
    assert re.search(r"^mine +4 +Mine$", listed, re.M)


def test_a_key_of_the_swept_schemes_need_not_be_one_of_the_default(tmp_path: Path) -> None:
    corners = Corners()
    words = ["-m", "scheme=fox,path_fox", "scheme.bias_init=1.5", HERE, f"results_dir={tmp_path}"]
    hydra_app.run(corners, "train", words)
    assert [each.config.scheme["bias_init"] for each in corners.jobs] == [1.5, 1.5]
    assert {each.config.scheme_name for each in corners.jobs} == {"fox", "path_fox"}
    wrong = ["train", "-m", "scheme=fox,path_fox", "scheme.bias_int=1.5"]
    assert "no key 'scheme.bias_int'" in run_posx(tmp_path, *wrong, code=2).stderr


def test_a_broken_experiment_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    for text in ("hydra: [", "hydra: {sweeper: {params: {seed: '[1'}}}"):
        (folder / "mine.yaml").write_text(text)
        done = run_posx(tmp_path, "list", "experiment", "--config-dir", "mine", code=2)
        assert "mine.yaml" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_dry_run_counts_and_estimates(tmp_path: Path) -> None:
    words = ["train", "-m", "scheme=rope,nope", "seed=0,1", *QUICK]
    nothing = run_posx(tmp_path, *words, "--dry-run").stdout.splitlines()
    assert nothing[0] == "4 runs: 4 to do"
    assert nothing[1].startswith("time: not known")
    assert not (tmp_path / "results").exists()

    run_posx(tmp_path, "train", "-m", "scheme=rope", "seed=0,1", *QUICK, HERE)
    run_posx(tmp_path, "train", "scheme=nope", *QUICK)
    for number, path in enumerate(sorted(tmp_path.rglob("run.json"))):
        record = json.loads(path.read_text()) | {"wall_s": 100.0}
        if number == 0:  # that of nope: begun, and broken off
            record |= {"status": "running"}
        path.write_text(json.dumps(record))
    words = ["train", "-m", "scheme=rope,nope", "seed=0,1,2", *QUICK]
    some = run_posx(tmp_path, *words, "--dry-run", "--jobs", "2").stdout.splitlines()
    assert some == [
        "6 runs: 2 done, 1 begun and not finished, 3 to do",
        "time: about 3:20 of training on 2 processes, from the mean of finished runs (1 by runs of "
        "the same kind, 3 by runs of the same task and length)",
    ]
    asked = run_posx(tmp_path, *words, "eval.lengths=[24]", "--dry-run").stdout
    assert asked.startswith("6 runs: 2 trained and not yet evaluated, 1 begun and not finished, 3")


def test_dry_run_says_what_is_refused(tmp_path: Path) -> None:
    words = ["train", "-m", "scheme=rope,nope", *QUICK, "model.d_head=7", "--dry-run"]
    words.remove("model.d_head=8")
    said = run_posx(tmp_path, *words, "eval.lengths=[3]").stdout.splitlines()
    assert said == [
        "2 runs: 2 refused",
        "refused, 2 of them: length 3 is too short for task copy: at least 5 tokens",
    ]
