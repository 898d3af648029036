"""What the machine is and how fast it multiplies and copies, in this very process."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from posx.cost import interleave

SIDE, COPIED, ROUNDS = 1024, 2**28, 5  # of the matrices; bytes of a copy
VERSIONS = ("posx", "torch", "transformers", "x-transformers", "typer", "pandas")


def facts() -> dict[str, str]:
    """Name and value of each fact."""
    a, b, c = (torch.randn(SIDE, SIDE) for _ in range(3))
    source = torch.zeros(COPIED // 4)
    target = torch.zeros_like(source)
    times = interleave(
        {"mm": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}, ROUNDS
    )
    product, copy = (median(each.cpu for each in times[name]) for name in ("mm", "copy"))
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in VERSIONS),
        f"float32 product of {SIDE} x {SIDE}": f"{2 * SIDE**3 / product / 1e9:.1f} Gflop/s",
        "copy": f"{2 * COPIED / copy / 1e9:.1f} GB/s read and written",
        "load when started": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
