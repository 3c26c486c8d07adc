"""The sums' machine code."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from retime.foundations.native import NoLibraryError, Source

__all__ = ["sums_library"]


@cache
def sums_library() -> ctypes.CDLL | NoLibraryError:
    """The library, or the reason why there is none."""
    folder = Path(__file__).parent
    return Source(
        "sums", "sums in shared memory", folder, "shared_sum.cpp", _declare, ("-O3", "-ffp-contract=off")
    ).library()


def _declare(library: ctypes.CDLL) -> None:
    library.retime_sums_bytes.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.retime_sums_bytes.restype = ctypes.c_int64
    library.retime_sums_open.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int),
    ]
    library.retime_sums_open.restype = ctypes.c_void_p
    library.retime_sums_run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int),
    ]
    library.retime_sums_time.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)]
    library.retime_sums_differ.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)]
    for name in ("stop", "fail", "close"):
        getattr(library, f"retime_sums_{name}").argtypes = [ctypes.c_void_p]
