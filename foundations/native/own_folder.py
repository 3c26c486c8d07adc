"""Files that are kept for later runs in a folder of one's own, and are what they were when they come back.

Code that is loaded from a file does all that its owner may do. So nobody else may have put it there: the folder and its
files belong to this user, nobody else may write into them, and each file's name holds the hash of what is in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["OwnFolder"]

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
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{path} is no folder")
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) != _OWNER_ONLY:  # another umask, or an earlier version's
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
            made = Path(unfinished) / key
            make(made)
            made.chmod(_OWNER_ONLY)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            return made.replace(self._path / _name(key, made))

    def _clean_up(self) -> None:
        for path in self._path.glob(f"{_UNFINISHED}*"):
            try:
                left = time.time() - path.lstat().st_mtime > self._left_after_s
            except FileNotFoundError:  # just finished
                continue
            if left:
                shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _name(key: str, path: Path) -> str:
    return f"{key}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"
