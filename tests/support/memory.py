"""What a process holds."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import psutil


class Mallinfo(ctypes.Structure):
    """What glibc says of its heaps: <malloc.h>, mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    )


def resident() -> int:
    """Bytes of this process that are in memory. Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """The same without what its heaps have free, which is a matter of what lies above it there."""
    heaps = _heaps()
    return resident() - (heaps.fordblks if heaps else 0)


def used() -> int:
    """Bytes that this process has asked for and not given back; what its heaps hold between those comes and goes."""
    gc.collect()
    heaps = _heaps()
    return int(heaps.uordblks + heaps.hblkhd) if heaps else int(psutil.Process().memory_info().rss)


def _heaps() -> Mallinfo | None:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # glibc's alone
        return None
    mallinfo.restype = Mallinfo
    info: Mallinfo = mallinfo()
    return info
