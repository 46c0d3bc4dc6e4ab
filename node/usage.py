"""Memory of this node: its own process and the libp2p daemon that belongs to it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def memory_mb() -> tuple[float, float]:
    """Resident memory now and at its peak, in MB, of this process and its children together.

    The peak is the sum of each one's own; where the system keeps none for children, their present use.
    """
    own = psutil.Process()
    now, peak = own.memory_info().rss, _peak_of(own.pid) or _own_peak()
    for child in own.children():
        try:
            resident = child.memory_info().rss
            now += resident
            peak += max(resident, _peak_of(child.pid))
        except psutil.Error:  # it ended meanwhile
            continue
    return round(now / 1e6, 1), round(peak / 1e6, 1)


def _own_peak() -> int:
    """Where there is no /proc. (On Linux this one is useless: it begins with the parent's at the fork.)"""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
