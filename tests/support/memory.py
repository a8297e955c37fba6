"""What a process holds."""

from __future__ import annotations

import ctypes
import gc

import psutil


class Mallinfo(ctypes.Structure):
    """What glibc says of its heaps: <malloc.h>, mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    )


def used() -> int:
    """Bytes that this process has asked for and not given back; what its heaps hold between those comes and goes."""
    gc.collect()
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # glibc's alone
        return int(psutil.Process().memory_info().rss)
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
