"""The memory that this process uses and may use, by its control group, its resource limits and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.runtime.machine import cgroup

NO_MEMORY = re.compile(
    r"[Ff]ailed to allocate|allocate memory|Available memory of \d+ is smaller|bad_alloc|bad allocation|out of memory"
    r"|ALLOC(ATION)?_FAILED"
)
"""What ONNX Runtime, PyTorch and CUDA's libraries report when an allocation fails: of the system's memory or a GPU's,
or by the limit of an arena."""

_MEMINFO = Path("/proc/meminfo")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# A control group of version 1 without a limit states the largest multiple of a page, which is above this number.
_UNLIMITED = 1 << 60
_M_MMAP_THRESHOLD = -3  # of malloc.h
_SHARE_OF_ENGINES = 0.75
# Growth above which unused memory is given back, in bytes; the first and longest time between two attempts, in seconds.
_GROWN = 256 << 20
_SOONEST = 1.0
_LATEST = 600.0


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 if the system does not report it."""
    return _statm()[1]


def proportional() -> int:
    """Return the bytes that this process and its engine processes hold: the sum of their proportional set sizes.

    A page that several processes share counts for each by an equal part.
    """
    return sum(_proportional_set_size(process) for process in ("self", *engine_processes()))


def return_large_blocks() -> None:
    """Let the C library return freed blocks of 4 MiB and more to the system at once, instead of keeping up to 32 MiB.

    Otherwise it keeps these blocks in heaps of threads, which :func:`trim` cannot empty: a freed model of 20 MB left
    40 MB behind.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 << 20)


def trim() -> None:
    """Return unused memory of the C library's heap to the system, where it can do so."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def engine_processes() -> Iterator[str]:
    """Yield the process ids of this process's children that run engines, and of their children, from torchrun."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # the process may have ended
            if b"ingot.runtime.engines.isolation." in (folder / "cmdline").read_bytes():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    for pid, parent in parents.items():
        if os.getpid() in (parent, parents.get(parent)):
            yield str(pid)


def _proportional_set_size(process: str) -> int:
    folder = Path("/proc") / process
    with contextlib.suppress(OSError, StopIteration):  # the file of another user's process cannot be read
        lines = (folder / "smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    with contextlib.suppress(OSError):
        return int((folder / "statm").read_text().split()[1]) * _PAGE
    return 0


def limit(cgroup: Path = cgroup.ROOT, meminfo: Path = _MEMINFO) -> float:
    """Return the memory limit of this process in bytes; infinity if unknown."""
    return min([most for most, _ in (*_groups(cgroup), *_resources())] + [_of_machine("MemTotal", meminfo)])


def engine_limit() -> float:
    """Return the share of :func:`limit` that engines may hold: weights, and the tensors of their calls."""
    return _SHARE_OF_ENGINES * limit()


def available(cgroup: Path = cgroup.ROOT, meminfo: Path = _MEMINFO) -> float:
    """Return how many more bytes this process may allocate; infinity if unknown. This reads several files."""
    rests = [most - used for most, used in (*_groups(cgroup), *_resources())]
    return max(0.0, min([*rests, _of_machine("MemAvailable", meminfo)]))


def _groups(root: Path) -> Iterator[tuple[float, float]]:
    """Yield the limit and the usage, in bytes, of each control group around this process that has a limit.

    Caches of files do not count as usage.
    """
    for folder in cgroup.folders("memory", root):
        for most, used, stat, cache in (
            ("memory.max", "memory.current", "memory.stat", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                found = int((folder / most).read_text())
                if found < _UNLIMITED:
                    lines = dict(line.split() for line in (folder / stat).read_text().splitlines())
                    yield found, int((folder / used).read_text()) - int(lines.get(cache, 0))


def _resources() -> Iterator[tuple[float, float]]:
    """Yield each resource limit of memory that is set, and the usage that it limits, in bytes."""
    try:
        import resource
    except ModuleNotFoundError:  # not Unix
        return
    size, _, data = _statm()
    for kind, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield most, used


def private() -> int:
    """Return the bytes of private memory of this process that RLIMIT_DATA counts; 0 if unknown."""
    return _statm()[2]


def _statm() -> tuple[int, int, int]:
    """Return the bytes of address space, resident memory and data."""
    try:
        pages = [int(word) for word in Path("/proc/self/statm").read_text().split()]
    except OSError:  # not Linux
        return 0, 0, 0
    return pages[0] * _PAGE, pages[1] * _PAGE, pages[5] * _PAGE


def _of_machine(name: str, meminfo: Path) -> float:
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return float(line.split()[1]) * 1024
    return math.inf


class Sweeper:
    """Decides when memory that engines keep for their next call is returned to the system.

    Memory is returned when the process has grown by 256 MiB. If the process soon grows again, its calls need the
    memory, so the time until the next attempt doubles, up to 10 minutes.

    Args:
        give_back: returns unused memory to the system; returns whether it could.
        returned: called with the number of bytes that were returned.
    """

    def __init__(self, give_back: Callable[[], bool], returned: Callable[[float], None]):
        self._give_back = give_back
        self._returned = returned
        self._low = math.inf  # resident bytes without unused memory
        self._next = 0.0
        self._wait = _SOONEST

    def check(self, now: float, *, idle: bool) -> None:
        """Return memory if the process has grown and the last attempt was long enough ago.

        Args:
            now: the time in seconds, of a clock that never goes back.
            idle: whether no engine call runs: growth is then measured from the memory that is left.
        """
        before = resident()
        self._low = min(self._low, before)
        if before < self._low + _GROWN or now < self._next or not self._give_back():
            return
        after = resident()
        self._returned(max(0, before - after))
        self._wait = _SOONEST if now > self._next + 2 * self._wait else min(2 * self._wait, _LATEST)
        self._next = now + self._wait
        if idle:
            self._low = after
