"""Schemes that strike: a sweep must survive what they do in the midst of training."""

import os
import sys
from pathlib import Path

import pandas as pd
import pytest

# Schemes that do something to the sweep when one of their runs takes a training step. They find
# what they need in the folder of their file.
MODULE = '''
"""Schemes that strike."""

import os
import signal
import subprocess
from pathlib import Path

from posx import progress
from posx.schemes.base import Scheme

HERE = Path(__file__).parent


class Strikes(Scheme):
    """Strikes at the start of a training step (https://example.org/strikes)."""

    enters = "input"

    def __init__(self, site, at: int = 6, times: int = 1):
        super().__init__(site)
        self.at, self.times = at, times

    def embed(self, x, pos):
        if self.training and x.requires_grad:
            self.at -= 1
            mark = f"mark-{type(self).__name__}"
            struck = len(list(HERE.glob(f"{mark}*")))
            if self.at == 0 and struck < self.times:
                (HERE / f"{mark}{struck}").touch()
                self.strike()
        return x

    def strike(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Breaks(Strikes):
    """Raises (https://example.org/breaks)."""

    def strike(self):
        raise ZeroDivisionError("of the test")


class Dies(Strikes):
    """Strikes again and again (https://example.org/dies)."""


class Leaves(Strikes):
    """Ends its process (https://example.org/leaves)."""

    def strike(self):
        os._exit(7)


class Stops(Strikes):
    """Asks the owner of the sweep to stop (https://example.org/stops)."""

    def strike(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getppid(), signal.SIGTERM)
        signal.sigwait([signal.SIGTERM])  # which the owner passes on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)


class Warned(Strikes):
    """Is told that its time is up (https://example.org/warned)."""

    def strike(self):
        os.kill(os.getpid(), signal.SIGUSR2)


class Bumped(Strikes):
    """Has its node taken by somebody who is first in line (https://example.org/bumped)."""

    def strike(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        words = ["--partition=urgent", "--exclusive", "--time=1", "--output=/dev/null"]
        subprocess.run(["sbatch", *words, "--wrap=true"], check=True)
        signal.sigwait([signal.SIGTERM])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)


class Orphans(Strikes):
    """Kills the owner of the sweep, and is trained on without one
    (https://example.org/orphans)."""

    def strike(self):
        progress.SEND_EVERY_S = 0.0
        owner = os.getppid()
        os.kill(owner, signal.SIGKILL)
        while os.getppid() == owner:
            pass


class Holds(Strikes):
    """Tells that it is here, then waits (https://example.org/holds)."""

    def strike(self):
        (HERE / "owner").write_text(f"{os.getpid()} {os.getppid()}")
        (HERE / "here").write_text("yes")  # a fifo, as is the other
        (HERE / "go").read_text()


class Releases(Strikes):
    """Lets Holds go on (https://example.org/releases)."""

    def strike(self):
        (HERE / "go").write_text("")


class Murders(Strikes):
    """Kills the process of Holds and its owner (https://example.org/murders)."""

    def strike(self):
        worker, owner = map(int, (HERE / "owner").read_text().split())
        os.kill(owner, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
'''


@pytest.fixture
def strikers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`--config-dir=...` of the schemes above; they count their strikes in the folder."""
    (tmp_path / "strikers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parent.parent}")
    monkeypatch.delitem(sys.modules, "strikers", raising=False)
    folder = tmp_path / "mine" / "scheme"
    folder.mkdir(parents=True)
    names = (
        "strikes",
        "breaks",
        "stops",
        "orphans",
        "holds",
        "releases",
        "murders",
        "warned",
        "bumped",
    )
    for name, number in {**dict.fromkeys(names, 1), "dies": 9, "leaves": 9}.items():
        (folder / f"{name}.yaml").write_text(
            f"# {name}\n_target_: strikers.{name.capitalize()}\nat: 6\ntimes: {number}\n"
        )
    return f"--config-dir={tmp_path / 'mine'}"


def run_of(folder: Path, scheme: str) -> Path:
    (found,) = (folder / "results" / "runs" / "copy" / scheme).iterdir()
    return found


def jobs_of(folder: Path) -> pd.DataFrame:
    """What the last sweep says of its jobs."""
    last = max((folder / "results" / "sweeps").iterdir())
    return pd.read_csv(last / "jobs.csv").set_index("job")


# -- what survives ---------------------------------------------------------------------------------
