"""Where the shipped configs lie, and where results go."""

import os
from pathlib import Path

RESULTS_VARIABLE = "POSX_RESULTS_DIR"


def config_dir() -> Path:
    """The shipped configs: inside the package when installed from a wheel, else beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def results_dir() -> Path:
    """`$POSX_RESULTS_DIR`, or `results` in the current folder."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")
