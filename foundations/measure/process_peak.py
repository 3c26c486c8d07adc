"""The most memory that this process has had, kept although others forget it.

Measuring a phase means that the system forgets the peak before it: the caching allocator's on CUDA, else the resident
size's, which the Linux kernel keeps (``VmHWM``, ``ru_maxrss``) and forgets on request (``5`` into
``/proc/self/clear_refs``). So whoever in this project lets a peak be forgotten calls :func:`take_peak` or
:func:`forget_peak`, which note it first; :func:`peak_so_far` knows all of them. Resets by others cannot be seen.
"""

from __future__ import annotations

import os
import resource
import weakref
from pathlib import Path

import torch

__all__ = ["PeakWatch", "forget_peak", "peak_so_far", "status_bytes", "take_peak"]

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
_CPU = torch.device("cpu")

_noted: dict[torch.device, int] = {}
os.register_at_fork(after_in_child=_noted.clear)
_watches: weakref.WeakSet[PeakWatch] = weakref.WeakSet()


class PeakWatch:
    """The most resident bytes of this process from now on, though others let its peak be forgotten.

    Attributes:
        begin_bytes: resident now.

    Raises:
        OSError, LookupError: as :func:`take_peak`.
    """

    def __init__(self) -> None:
        forget_peak()
        self.begin_bytes = self.peak_bytes = status_bytes("VmRSS")
        _watches.add(self)

    def read(self) -> int:
        """Return the peak so far."""
        peak_so_far()
        return self.peak_bytes


def take_peak(device: torch.device = _CPU) -> int:
    """The peak in bytes since it was forgotten last, or the process began; it begins again at what is in use now.

    Args:
        device: a CUDA device for its allocated bytes; any other for the process's resident size.

    Raises:
        OSError: the kernel does not forget the resident size's peak.
        LookupError: the kernel does not tell it.
    """
    peak = _present_peak(device)
    _note(device, peak)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR_REFS.write_text("5")
    return peak


def forget_peak(device: torch.device = _CPU) -> None:
    """The peak begins again at what is in use now.

    Raises:
        OSError, LookupError: as :func:`take_peak`.
    """
    take_peak(device)


def peak_so_far(device: torch.device = _CPU) -> int:
    """The most bytes that this process has had: allocated on a CUDA device, otherwise resident."""
    try:
        peak = _present_peak(device)
    except (OSError, LookupError):  # no Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _note(device, peak)


def status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes, such as VmRSS.

    Raises:
        LookupError: the kernel does not tell.
    """
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024  # the kernel writes "kB" and means KiB
    raise LookupError(f"{STATUS} has no {field}")


def _present_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")


def _note(device: torch.device, peak: int) -> int:
    place = device if device.type == "cuda" else _CPU
    _noted[place] = max(peak, _noted.get(place, 0))
    for watch in _watches if place == _CPU else ():
        watch.peak_bytes = max(peak, watch.peak_bytes)
    return _noted[place]
