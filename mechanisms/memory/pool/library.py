"""The pool's machine code: compiled once for each torch version with the system's C++ compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from retime.mechanisms.compiled.own_folder import OwnFolder

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "pool.cpp"
_TIMEOUT_S = 120


class NoPoolError(RuntimeError):
    """Why there is no pool here."""


@cache
def pool_library() -> ctypes.CDLL | NoPoolError:
    """The library, or the reason why there is none: another system than Linux, no compiler, no torch headers.

    It lies in ``$XDG_CACHE_HOME/retime`` (``~/.cache/retime``), a folder that nobody else may write into; ``$CXX``
    names another compiler than ``c++``.
    """
    if sys.platform != "linux":
        return NoPoolError(f"the pool is for Linux, this is {sys.platform}")
    try:
        folder = OwnFolder(_cache_home() / "retime", left_after_s=2 * _TIMEOUT_S)
        key = _key()
        path = folder.find(key) or folder.keep(key, _compile)
        try:
            return _opened(path)
        except (OSError, AttributeError) as error:
            path.unlink(missing_ok=True)
            return NoPoolError(
                f"what {_compiler()[0]} made is not the pool's library ({error}): name another compiler in CXX"
            )
    except NoPoolError as error:
        return error
    except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
        return NoPoolError(f"the pool's library cannot be kept: {error}; set XDG_CACHE_HOME to a folder of your own")


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.retime_pool_install.restype = ctypes.c_bool
    library.retime_pool_limit.argtypes = [ctypes.c_int64]
    library.retime_pool_size_of.argtypes = [ctypes.c_void_p]
    library.retime_pool_size_of.restype = ctypes.c_int64
    library.retime_pool_follow.argtypes = [ctypes.c_double]
    library.retime_pool_here.argtypes = library.retime_pool_turn.argtypes = [ctypes.c_bool]
    for name in ("remove", "counts", "reset_peaks", "begin_window"):
        getattr(library, f"retime_pool_{name}")
    return library


def _cache_home() -> Path:
    """By the XDG specification a relative one is to be ignored: it would depend on where a program is started."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "")
    try:
        return shlex.split(named) or ["c++"]
    except ValueError as error:
        raise NoPoolError(f"the pool cannot be compiled: CXX={named!r} is no command ({error})") from error


def _options() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    return ["-std=c++20", "-O2", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _home() -> Path:
    return Path(torch.__file__).parent


def _key() -> str:
    sources = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]pp"))]
    made_of = [*sources, torch.__version__, str(_home()), platform.machine(), *_options()]
    return f"pool-{hashlib.sha256('|'.join(made_of).encode()).hexdigest()[:16]}"


def _compile(target: Path) -> None:
    """Put the library at ``target``.

    Raises:
        NoPoolError: there is no compiler, or it fails.
    """
    libraries = [f"-I{_home() / 'include'}", f"-L{_home() / 'lib'}", "-lc10", f"-Wl,-rpath,{_home() / 'lib'}"]
    compiler = _compiler()
    command = [*compiler, *_options(), str(_SOURCE), "-o", str(target), *libraries]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NoPoolError(f"the pool cannot be compiled: {error}; install a C++ compiler, or name it in CXX") from error
    if run.returncode or not target.is_file():
        said = run.stderr[-500:] or f"it made nothing, and ended with {run.returncode}"
        raise NoPoolError(f"the pool cannot be compiled by {compiler[0]}, name another one in CXX: {said}")
