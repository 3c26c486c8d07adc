"""C++ of our own: from the wheel, or compiled once with the system's compiler and kept; loaded with ctypes.

A :class:`Source` names C++ files and what they are for. Without a compiler, or on other systems than Linux, its
``library()`` is the reason, and the feature works without it and says so.

A wheel has them compiled if torch and a compiler were there when it was built: ``make wheel``, or ``pip install
--no-build-isolation .``. Editable installs and wheels built in isolation compile on first use, which takes seconds. A
library is used if its name has the hash of the sources, options, kind of processor and, where it calls functions of
torch, torch's exact version (the memory pool; sums in shared memory fit all versions).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

# Files that are kept for later runs in a folder of one's own, and are what they were when they come back.
#
# Code that is loaded from a file does all that its owner may do. So nobody else may have put it there: the folder and
# its files belong to this user, nobody else may write into them, and each file's name holds the hash of what is in it.

_UNFINISHED = "unfinished-"
_OWNER_ONLY = 0o700


class OwnFolder:
    """A folder that this user alone can use; made where it is missing.

    Args:
        path: where. Folders above it are made too.
        left_after_s: what is unfinished for so many seconds was left by a process that was killed.

    Raises:
        PermissionError: it belongs to another user.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, left_after_s: float) -> None:
        self._path, self._left_after_s = path, left_after_s
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=_OWNER_ONLY)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{path} is no folder")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) != _OWNER_ONLY:  # another umask, or an earlier version's
            path.chmod(_OWNER_ONLY)

    def find(self, key: str) -> Path | None:
        """The file that was kept as ``key``; one that is not what was kept is removed."""
        for path in sorted(self._path.glob(f"{key}-*")):
            if _is_own(path) and path.name == _name(key, path):
                return path
            path.unlink(missing_ok=True)
        return None

    def keep(self, key: str, make: Callable[[Path], object]) -> Path:
        """Have ``make`` put a file at the path that it is given, and keep that.

        It appears at once and whole, whoever else does the same, and also if the machine goes down.
        """
        self._clean_up()
        with tempfile.TemporaryDirectory(dir=self._path, prefix=_UNFINISHED) as unfinished:
            os.chmod(unfinished, _OWNER_ONLY)  # whatever the umask
            target = Path(unfinished) / key
            make(target)
            target.chmod(_OWNER_ONLY)
            with target.open("rb") as file:
                os.fsync(file.fileno())
            return target.replace(self._path / _name(key, target))

    def _clean_up(self) -> None:
        for path in self._path.glob(f"{_UNFINISHED}*"):
            try:
                left = time.time() - path.lstat().st_mtime > self._left_after_s
            except FileNotFoundError:  # just finished
                continue
            if left:
                shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _name(key: str, path: Path) -> str:
    return f"{key}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"


_TIMEOUT_S = 120


class NoLibraryError(RuntimeError):
    """Reason why a library is not there."""


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
        links_torch: whether it calls functions of torch, so that it fits one version of torch only.
    """

    name: str
    what: str
    folder: Path
    main: str
    declare: Callable[[ctypes.CDLL], object]
    options: tuple[str, ...] = ("-O2",)
    links_torch: bool = True

    @property
    def shipped(self) -> Path:
        """Path of the library if the wheel has one that was made of these files, for this torch and machine."""
        return self.folder / f"{self._key()}.so"

    def library(self) -> ctypes.CDLL | NoLibraryError:
        """The library, or the reason why there is none: another system than Linux, no compiler, no torch headers.

        It comes with the wheel, or is compiled and kept in ``$XDG_CACHE_HOME/retime`` (``~/.cache/retime``), a folder
        that nobody else may write into; ``$CXX`` names another compiler than ``c++``.
        """
        if sys.platform != "linux":
            return NoLibraryError(f"{self.what} is for Linux, this is {sys.platform}")
        with suppress(OSError, AttributeError):  # not shipped, or made for another C library
            return self._load(self.shipped)
        try:
            folder = OwnFolder(_cache_home() / "retime", left_after_s=2 * _TIMEOUT_S)
            key = self._key()
            path = folder.find(key) or folder.keep(key, self.compile)
            try:
                return self._load(path)
            except (OSError, AttributeError) as error:
                path.unlink(missing_ok=True)
                made_by = self._compiler()[0]
                return NoLibraryError(
                    f"what {made_by} made is not the library of {self.what} ({error}); name another compiler in CXX"
                )
        except NoLibraryError as error:
            return error
        except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
            return NoLibraryError(
                f"the library of {self.what} cannot be kept: {error}; set XDG_CACHE_HOME to a folder of your own"
            )

    def _load(self, path: Path) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))
        self.declare(library)
        return library

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
        made_of = [*sources, torch.__version__ if self.links_torch else "", platform.machine(), *self._options()]
        return f"{self.name}-{hashlib.sha256('|'.join(made_of).encode()).hexdigest()[:16]}"

    def compile(self, target: Path) -> None:
        """Put the library at ``target``.

        Raises:
            NoLibraryError: there is no compiler, or it fails, or takes longer than two minutes.
        """
        home = Path(torch.__file__).parent
        torch_paths = [f"-I{home / 'include'}"]
        if self.links_torch:  # by its name alone: whoever loads this has imported torch
            torch_paths += [f"-L{home / 'lib'}", "-lc10"]
        compiler = self._compiler()
        command = [*compiler, *self._options(), str(self.folder / self.main), "-o", str(target), *torch_paths]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoLibraryError(
                f"{self.what} cannot be compiled: {compiler[0]} was stopped after {_TIMEOUT_S:g} s; "
                "use another compiler (CXX names it), or start again on a machine that is less busy"
            ) from error
        except (OSError, ValueError) as error:
            raise NoLibraryError(
                f"{self.what} cannot be compiled: {error}; install a C++ compiler, or name it in CXX"
            ) from error
        if run.returncode or not target.is_file():
            reason = run.stderr[-500:].strip() or f"it made nothing, and ended with {run.returncode}"
            raise NoLibraryError(f"{self.what} cannot be compiled by {compiler[0]}: {reason}; name another one in CXX")


def _cache_home() -> Path:
    """By the XDG specification a relative one is to be ignored: it would depend on where a program is started."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"
