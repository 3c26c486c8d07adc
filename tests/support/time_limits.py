"""Time limits that grow on a slow or busy machine: tests give them in seconds of an idle core of the machine below."""

import os
import time

_REFERENCE_S = 0.065
"""What `_arithmetic` takes on an idle core of an AMD EPYC, where the limits were written."""
_RENEWED_S = 60.0
_MOST = 4.0
"""A test that hangs for ever still ends."""
_VARIABLE = "RETIME_TESTS_SLOWNESS"
"""How many times as long as there things take now; in the environment, so that processes of a test know it too."""
_measured_at = float("-inf")


def limit_s(seconds: float) -> float:
    """A limit of so many seconds on an idle core, in seconds of this machine under its load."""
    return seconds * float(os.environ.get(_VARIABLE, "1"))


def measure_slowness() -> None:
    """Measure it again, if the last time was a minute ago: by arithmetic, and by how many others want its core."""
    global _measured_at
    now = time.monotonic()
    if now - _measured_at < _RENEWED_S:
        return
    _arithmetic()
    arithmetic = (time.monotonic() - now) / _REFERENCE_S
    slowness = max(1.0, arithmetic, _processes_a_core())
    os.environ[_VARIABLE] = f"{min(slowness, _MOST):.2f}"
    _measured_at = now


def _processes_a_core() -> float:
    """This one, and those that are not pytest's own: what a test hangs in must not make its limit longer."""
    own = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 + max(0.0, os.getloadavg()[0] - own) / cores


def _arithmetic() -> int:
    total = 0
    for number in range(1_000_000):
        total += number * number % 7
    return total
