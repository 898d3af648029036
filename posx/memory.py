"""How much memory a piece of work took, and how much the machine has."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

MIB = 2**20
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Peak:
    """Peak memory above the start of a `with` block, in MiB: of the GPU where one is used, else of
    the process. Where the kernel cannot reset its mark (not Linux), only growth beyond the highest
    point so far is seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib = 0.0

    def __enter__(self) -> "Peak":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start = float(torch.cuda.memory_allocated(self.device)) / MIB
            return self
        _give_back()
        try:
            CLEAR_REFS.write_text("5")
            self.start = _field(STATUS, "VmRSS")
        except OSError:
            self.start = _highest()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device) / MIB
        else:
            highest = _highest()
        self.mib = max(0.0, highest - self.start)


def _give_back() -> None:
    """Give freed memory back to the system, or what fits into it would count as nothing. glibc
    only; elsewhere a peak may read low."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _highest() -> float:
    """The highest resident size since the mark was reset, MiB."""
    try:
        return _field(STATUS, "VmHWM")
    except OSError:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size / MIB if sys.platform == "darwin" else size / 1024


def _field(path: Path, field: str) -> float:
    """A field of a file such as /proc/meminfo, MiB."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in {path}")


def available(device: torch.device) -> float:
    """Memory that the GPU or the machine can still give, MiB.

    On Linux what the kernel calls available: page cache that it would give back counts, and the
    limit of a container is kept. Elsewhere free pages.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / MIB
    try:
        free = _field(MEMINFO, "MemAvailable")
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / MIB
    try:
        limit, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, (limit - used) / MIB)
