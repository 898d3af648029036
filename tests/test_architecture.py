"""Imports point down, heavy modules stay out of light ones, and no name of a scheme is spelled
out."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "posx"

# A module imports only from lower floors (or its own, where no circle arises).
FLOORS = [
    ["errors", "paths"],
    ["lease"],
    [
        "catalog",
        "runs",
        "seeds",
        "stats",
        "metrics",
        "muon",
        "lengths",
        "progress",
        "display",
        "memory",
    ],
    ["config", "device", "schemes", "tasks", "index"],
    ["attention", "collect"],
    ["model", "summary"],
    ["generate", "build", "optim", "grids", "plot"],
    ["portrait", "cost", "render", "export"],
    ["train", "conformance", "cards", "report"],
    ["measure"],
    ["evaluate", "hydra_app", "choose"],
    ["job"],
    ["engines"],
    ["board"],
    ["pool"],
    ["sweep", "study"],
    ["commands"],
    ["cli", "__main__"],
]
FORBIDDEN = {
    "cli": {"torch", "pandas", "hydra", "omegaconf", "numpy", "rich"},
    "catalog": {"torch", "pandas", "hydra", "omegaconf"},
    "paths": {"torch", "pandas", "hydra", "omegaconf"},
    "collect": {"torch", "hydra", "omegaconf", "rich", "matplotlib"},
    "summary": {"torch", "hydra", "omegaconf", "rich", "matplotlib"},
    "grids": {"torch", "hydra", "omegaconf", "rich", "matplotlib"},
    "render": {"torch", "hydra", "omegaconf", "matplotlib"},
    "export": {"torch", "hydra", "omegaconf", "rich", "matplotlib"},
    "plot": {"torch", "hydra", "omegaconf", "rich", "matplotlib"},
    "report": {"torch", "hydra", "omegaconf", "matplotlib"},
    "stats": {"torch", "pandas", "hydra"},
    "schemes": {"hydra", "omegaconf", "pandas", "posx.model", "posx.train", "posx.attention"},
    "tasks": {"hydra", "omegaconf", "pandas", "posx.schemes", "posx.model"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The name on a floor: the module, or the folder it lies in."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(path: Path, top_level: bool = False) -> set[str]:
    """Imported modules; with `top_level`, only those that importing the file pulls in."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if top_level:
        for node in ast.walk(tree):
            lazy = isinstance(node, ast.FunctionDef) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            if lazy:
                skipped |= set(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floor(name: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if name in names)


def test_every_module_has_a_floor() -> None:
    placed = {name for names in FLOORS for name in names}
    assert {unit(path) for path in modules()} - {"__init__"} == placed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = unit(path)
    if here == "__init__":
        assert not imports(path)
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "posx" and len(parts) > 1 and parts[1] != here:
            assert floor(parts[1]) <= floor(here), f"{here} imports {parts[1]}, which is above it"


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_forbidden_imports(name: str) -> None:
    for path in modules():
        if unit(path) == name:
            bad = {
                found
                for found in imports(path, top_level=True)
                if any(found == no or found.startswith(f"{no}.") for no in FORBIDDEN[name])
            }
            assert not bad, f"{path.name} imports {bad}"


def test_no_circle_among_modules() -> None:
    edges = {
        unit(path): {
            part.split(".")[1]
            for part in imports(path, top_level=True)
            if part.startswith("posx.") and part.split(".")[1] != unit(path)
        }
        for path in modules()
    }
    done: set[str] = set()
    while ready := {name for name, needs in edges.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(edges), f"a circle among {set(edges) - done}"


def test_help_is_light() -> None:
    code = (
        "import sys\n"
        "from posx.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'hydra', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_scheme_is_named_outside_the_schemes() -> None:
    names = "|".join(path.stem for path in (PACKAGE.parent / "configs/scheme").glob("*.yaml"))
    branch = re.compile(rf"""(if|elif|match|==|case|in)\s[^\n"']*["']({names})["']""")
    for path in modules():
        if unit(path) != "schemes":
            found = branch.search(path.read_text())
            assert found is None, f"{path.name} decides by a scheme's name: {found.group()}"
