"""The pool's machine code: compiled once for each torch version with the system's C++ compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("pool.cpp")
_TIMEOUT_S = 120


class NoPoolError(RuntimeError):
    """Why there is no pool here."""


@cache
def pool_library() -> ctypes.CDLL | NoPoolError:
    """The library, or the reason why there is none: another system than Linux, no compiler, no torch headers.

    It lies in ``$XDG_CACHE_HOME/retime`` (``~/.cache/retime``); ``$CXX`` names another compiler than ``c++``.
    """
    if sys.platform != "linux":
        return NoPoolError(f"the pool is for Linux, this is {sys.platform}")
    try:
        library = ctypes.CDLL(str(_compiled()))
    except NoPoolError as error:
        return error
    except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
        return NoPoolError(f"the pool's library cannot be loaded or kept: {error}; set XDG_CACHE_HOME to a folder")
    library.retime_pool_install.restype = ctypes.c_bool
    library.retime_pool_limit.argtypes = [ctypes.c_int64]
    library.retime_pool_size_of.argtypes = [ctypes.c_void_p]
    library.retime_pool_size_of.restype = ctypes.c_int64
    return library


def _compiled() -> Path:
    home = Path(torch.__file__).parent
    options = [
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    made_of = [_SOURCE.read_text(), torch.__version__, str(home), platform.machine(), *options]
    name = f"pool-{hashlib.sha256('|'.join(made_of).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retime"
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        target = Path(unfinished) / name
        libraries = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        command = [*compiler, *options, str(_SOURCE), "-o", str(target), *libraries]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoPoolError(
                f"the pool cannot be compiled: {error}; install a C++ compiler, or name it in CXX"
            ) from error
        if run.returncode:
            raise NoPoolError(
                f"the pool cannot be compiled by {command[0]}, name another one in CXX: {run.stderr[-500:]}"
            )
        target.replace(folder / name)  # at once: other processes may be doing the same
    return folder / name
