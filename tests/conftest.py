import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from striking import strikers as strikers
from typer.testing import CliRunner, Result

from posx.cli import app

# A run of a second or two that goes through every stage: checks, decay, end.
QUICK = [
    "train.max_steps=12",
    "train.decay_steps=4",
    "train.check_every=4",
    "train.check_sequences=4",
    "train.checkpoint_every=3",
    "train.tokens_per_step=128",
    "train_len=16",
    "model.n_layers=2",
    "model.d_model=16",
    "model.n_heads=2",
    "model.d_head=8",
    "model.d_ff=32",
]

HERE = "hydra/launcher=basic"  # a sweep in the process of the test

Posx = Callable[..., Result]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def oracle() -> ModuleType:
    """x-transformers; its import warns about torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers.x_transformers")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def run_posx(folder: Path, *words: str, code: int | None = 0, **variables: str) -> Result:
    """The command in `folder`, in this process, which spares the seconds that importing torch
    takes; checks the exit code."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", **variables})
    finally:
        os.chdir(here)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert code is None or done.exit_code == code, f"exit {done.exit_code}\n{done.stderr}"
    return done


@pytest.fixture
def posx(tmp_path: Path) -> Posx:
    """`posx(word, ..., code=0, VARIABLE=value)` in a folder of its own."""

    def run(*words: str, code: int | None = 0, **variables: str) -> Result:
        return run_posx(tmp_path, *words, code=code, **variables)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with short finished runs of rope and learned (not converged) on copy."""
    folder = tmp_path_factory.mktemp("trained")
    run_posx(folder, "train", "-m", "scheme=rope,learned", *QUICK, HERE)
    return folder
