"""Machine code: compiled once for each torch version with the system's C++ compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from retime.foundations.native.own_folder import OwnFolder

__all__ = ["NoLibraryError", "Source"]

_TIMEOUT_S = 120


class NoLibraryError(RuntimeError):
    """Why a library is not there."""


@dataclass(frozen=True)
class Source:
    """C++ files that make one library.

    Attributes:
        name: of the kept file.
        what: it is, for errors: "the pool".
        folder: of its files, all of which count for whether it has changed.
        main: the file that is compiled.
        declare: sets argument types, and reads the name of each function once; raises AttributeError if one is missing.
        options: for the compiler, beside the usual ones.
    """

    name: str
    what: str
    folder: Path
    main: str
    declare: Callable[[ctypes.CDLL], object]
    options: tuple[str, ...] = ("-O2",)

    def library(self) -> ctypes.CDLL | NoLibraryError:
        """The library, or the reason why there is none: another system than Linux, no compiler, no torch headers.

        It lies in ``$XDG_CACHE_HOME/retime`` (``~/.cache/retime``), a folder that nobody else may write into; ``$CXX``
        names another compiler than ``c++``.
        """
        if sys.platform != "linux":
            return NoLibraryError(f"{self.what} is for Linux, this is {sys.platform}")
        try:
            folder = OwnFolder(_cache_home() / "retime", left_after_s=2 * _TIMEOUT_S)
            key = self._key()
            path = folder.find(key) or folder.keep(key, self._compile)
            try:
                library = ctypes.CDLL(str(path))
                self.declare(library)
                return library
            except (OSError, AttributeError) as error:
                path.unlink(missing_ok=True)
                made_by = self._compiler()[0]
                return NoLibraryError(
                    f"what {made_by} made is not the library of {self.what} ({error}): name another compiler in CXX"
                )
        except NoLibraryError as error:
            return error
        except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
            return NoLibraryError(
                f"the library of {self.what} cannot be kept: {error}; set XDG_CACHE_HOME to a folder of your own"
            )

    def _compiler(self) -> list[str]:
        named = os.environ.get("CXX", "")
        try:
            return shlex.split(named) or ["c++"]
        except ValueError as error:
            raise NoLibraryError(f"{self.what} cannot be compiled: CXX={named!r} is no command ({error})") from error

    def _options(self) -> list[str]:
        abi = int(torch.compiled_with_cxx11_abi())
        return ["-std=c++20", *self.options, "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]

    def _key(self) -> str:
        sources = [path.read_text() for path in sorted(self.folder.glob("*.[ch]pp"))]
        made_of = [*sources, torch.__version__, str(_home()), platform.machine(), *self._options()]
        return f"{self.name}-{hashlib.sha256('|'.join(made_of).encode()).hexdigest()[:16]}"

    def _compile(self, target: Path) -> None:
        """Put the library at ``target``.

        Raises:
            NoLibraryError: there is no compiler, or it fails.
        """
        libraries = [f"-I{_home() / 'include'}", f"-L{_home() / 'lib'}", "-lc10", f"-Wl,-rpath,{_home() / 'lib'}"]
        compiler = self._compiler()
        command = [*compiler, *self._options(), str(self.folder / self.main), "-o", str(target), *libraries]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise NoLibraryError(
                f"{self.what} cannot be compiled: {error}; install a C++ compiler, or name it in CXX"
            ) from error
        if run.returncode or not target.is_file():
            said = run.stderr[-500:] or f"it made nothing, and ended with {run.returncode}"
            raise NoLibraryError(f"{self.what} cannot be compiled by {compiler[0]}, name another one in CXX: {said}")


def _cache_home() -> Path:
    """By the XDG specification a relative one is to be ignored: it would depend on where a program is started."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def _home() -> Path:
    return Path(torch.__file__).parent
