"""Names that tell who made a network namespace, so that those of a killed process are found and removed."""

import contextlib
import itertools
import os
import re
import signal
from pathlib import Path

from retime.recipes.emulated.requirements import CommandError, call

_NAME = re.compile(r"retime-(?P<pid>\d+)-(?P<born>\d+)-(?P<serial>\d+)-(?:switch|h\d+)")
_serials = itertools.count()


def new_prefix() -> str:
    """`retime-<pid>-<start time>-<serial>`: no other network on this machine has it."""
    return f"retime-{os.getpid()}-{_born(os.getpid())}-{next(_serials)}"


def existing() -> list[str]:
    """The names of all namespaces made here, by any process."""
    names = (line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in names if _NAME.fullmatch(name)]


def remove_stale() -> list[str]:
    """Remove the namespaces, and the processes in them, of processes that no longer run; returns their names."""
    stale = [name for name in existing() if not _owner_runs(name)]
    for name in stale:
        remove(name)
    return stale


def remove(name: str) -> None:
    """End the processes in a namespace and delete it; the interfaces in it go too. No error if it is gone."""
    with contextlib.suppress(CommandError):
        for pid in call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(CommandError):
        call("ip", "netns", "delete", name)


def _owner_runs(name: str) -> bool:
    found = _NAME.fullmatch(name)
    assert found
    # A process number is given out again, a number with its start time is not.
    return _born(int(found["pid"])) == int(found["born"])


def _born(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), /proc/pid/stat field 22); None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
