"""The wheel that users install: built from the sdist, with every config, and working elsewhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as for a release: sdist first, the wheel from it."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(out), cwd=ROOT)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_holds_exactly_the_configs_of_the_repository(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "configs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.startswith("posx/configs/")) == sorted(
        f"posx/{name}" for name in tracked
    )
    assert {"posx/py.typed", "hydra_plugins/posx_launchers/launcher.py"} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "results/", "scripts/"))]


@pytest.mark.slow
def test_wheel_works_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
        cwd=ROOT,
    )
    work = tmp_path / "work"
    work.mkdir()
    here = {"PYTHONPATH": str(target)}
    where = run("-c", "import posx.paths; print(posx.paths.config_dir())", cwd=work, **here)
    assert Path(where.strip()) == target / "posx" / "configs"
    from conftest import QUICK

    run("-m", "posx", "train", "-m", "scheme=rope", *QUICK, cwd=work, **here)
    run("-m", "posx", "eval", "--lengths", "24", "--sequences", "2", cwd=work, **here)
    assert "rope" in run("-m", "posx", "report", cwd=work, **here)


def test_citation_names_the_version_of_the_package() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
