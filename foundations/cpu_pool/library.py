"""The pool's machine code."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from retime.foundations.native import NoLibraryError, Source

__all__ = ["pool_library"]


@cache
def pool_library() -> ctypes.CDLL | NoLibraryError:
    """The library, or the reason why there is none."""
    return Source("pool", "the pool", Path(__file__).parent, "pool.cpp", _declare).library()


def _declare(library: ctypes.CDLL) -> None:
    library.retime_pool_install.restype = ctypes.c_bool
    library.retime_pool_limit.argtypes = [ctypes.c_int64]
    library.retime_pool_size_of.argtypes = [ctypes.c_void_p]
    library.retime_pool_size_of.restype = ctypes.c_int64
    library.retime_pool_follow.argtypes = [ctypes.c_double]
    library.retime_pool_here.argtypes = library.retime_pool_turn.argtypes = [ctypes.c_bool]
    for name in ("remove", "counts", "reset_peaks", "begin_window"):
        getattr(library, f"retime_pool_{name}")
