"""What the machine offers to this process: cores and memory, container limits included. Linux; elsewhere guesses."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def physical_cores() -> int:
    """Cores worth one compute thread each, at least 1: hyper-threads of one core and CPU quotas are considered."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota() or len(siblings)))


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping or hitting the container's limit; None when unknown."""
    known = [value for value in (_host_available(), _container_available()) if value is not None]
    return min(known, default=None)


def _quota() -> int | None:
    """CPUs the container may use, rounded up; None without a limit. More threads than that stall each other."""
    quota, _, period = (_read(_CGROUP / "cpu.max") or "max").partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else None


def _host_available() -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container_available() -> int | None:
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is None or used is None or not limit.isdigit():
        return None
    cache = next(
        (line.split()[1] for line in (_read(_CGROUP / "memory.stat") or "").splitlines() if line[:5] == "file "), 0
    )
    return max(0, int(limit) - int(used) + int(cache))  # the page cache, where mapped weights sit, can be given back


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
