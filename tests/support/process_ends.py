"""Whether other processes run still, for tests of what outlives whom."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from support.time_limits import limit_s
from support.warm_start import Cold, Warm

_PATIENCE_S = 20.0
"""A process that was killed takes a moment to go, longer on a busy machine."""


def runs(pid: str) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def first_line(out: Path, process: Cold | Warm) -> str:
    """What a process that was started first writes into its output.

    Raises:
        AssertionError: it has ended without.
    """
    while not (out.exists() and "\n" in out.read_text()):
        assert process.returncode is None
        time.sleep(0.02)
    return out.read_text().splitlines()[0]


def in_shared_memory(pid: str) -> list[str]:
    """Files of `/dev/shm` that have this process in their names."""
    return [name for name in os.listdir("/dev/shm") if pid in re.findall(r"\d+", name)]


def ended(pids: Sequence[str]) -> bool:
    """Whether all of them go by themselves; those that do not are killed."""
    deadline = time.monotonic() + limit_s(_PATIENCE_S)
    while left := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(int(pid), signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True
