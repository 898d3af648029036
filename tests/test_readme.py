"""What the README says is there: commands, files, schemes and numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from posx import catalog
from posx.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = get_command(app).commands


def commands() -> list[list[str]]:
    """Every `posx ...` in code, cut into words; comments left out."""
    blocks = re.findall(r"^    (posx .*)$", README, re.M) + re.findall(r"`(posx [^`]+)`", README)
    lines = [part for block in blocks for part in block.split("  #")[0].split("; ")]
    words = dict.fromkeys(line.strip() for line in lines if line.strip().startswith("posx "))
    return [line.split() for line in words]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist_with_their_options(words: list[str]) -> None:
    verb = COMMANDS[words[1]]
    options = {name for parameter in verb.params for name in parameter.opts}
    hydra = {"-m", "--cfg", "--config-dir"}
    for word in words[2:]:
        if word.startswith("-"):
            assert word in options or (words[1] == "train" and word in hydra), word
        group, equals, names = word.partition("=")
        if equals and group in ("scheme", "task", "model", "extension", "optim"):
            known = {*catalog.files(group), "mine"}
            assert set(names.split(",")) <= known, word


def test_files_exist() -> None:
    for name in re.findall(r"(?:posx|configs|scripts|results|tests)/[\w./]*", README):
        path = ROOT / name
        assert path.exists() or name.startswith("results/runs"), name


def test_every_module_has_its_line() -> None:
    modules = {f"posx/{path.name}" for path in (ROOT / "posx").glob("*.py")}
    told = set(re.findall(r"posx/\w+\.py", README))
    assert modules - told <= {"posx/__init__.py", "posx/__main__.py"}
    assert told <= modules


def test_the_tables_of_schemes_are_those_of_the_catalogue() -> None:
    script = [sys.executable, ROOT / "scripts" / "catalogue", "--check"]
    assert subprocess.run(script).returncode == 0, "run scripts/catalogue"
    for group in ("scheme", "extension"):
        for name in catalog.files(group):
            assert f"`{name}`" in README, name
        assert f"{len(catalog.files(group))} {group}s" in README


def test_numbers_are_those_of_the_reference_tables() -> None:
    """The rows of the README's comparison stand word for word in results/reference."""
    tables = "".join(path.read_text() for path in (ROOT / "results/reference").glob("*.md"))
    rows = re.findall(r"^\|.* [01]\.\d{3}\b.*\|$", README, re.M)
    assert len(rows) >= 8
    for row in rows:
        assert row in tables, row
