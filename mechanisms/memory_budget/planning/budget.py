"""A byte budget, as people write it."""

from __future__ import annotations

import re
import sys
from fractions import Fraction

import torch

from retime.foundations.byte_sizes import parse_bytes
from retime.mechanisms.memory_budget.planning.cpu_limits import own_bytes, shared_bytes

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_budget(budget: int | str, device: torch.device | str | int | None, sharing: int = 1) -> int:
    """The bytes that a budget means on ``device``.

    Args:
        budget: bytes, or a text: ``"8GiB"``, ``"500 MB"``, ``"90%"`` of the device's memory. On a CPU that is
            the least of the machine's memory, the limits of the process's control group and of all groups around it
            (``memory.max`` or ``memory.limit_in_bytes``: a container's), ``RLIMIT_DATA`` and ``RLIMIT_AS``.
        device: where training runs; None where that is not known yet: only the form of bytes is checked then.
        sharing: processes on this machine; on a CPU they share a percentage, since they share the memory. Each has its
            own resource limits.

    Raises:
        TypeError: neither a whole number nor a text.
        ValueError: it cannot be read, is not above 0, or is more than the device has.
    """
    total = _device_bytes(device)
    percent = _PERCENT.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if percent:
        if not 0 < Fraction(percent[1]) <= 100:
            raise ValueError(f"budget={budget!r} must be above 0% and at most 100% of the device's memory")
        wanted = int(Fraction(percent[1]) / 100 * _device_bytes(device, sharing))
    else:
        wanted = parse_bytes("budget", budget, examples="'8GiB', '500MB' or '90%'")
    if wanted < 1:
        raise ValueError(f"budget={budget!r} must be above 0")
    if wanted > total:
        raise ValueError(f"budget={budget!r} is {wanted} bytes, but {device} has {total}: give at most that, or '90%'")
    return wanted


def _device_bytes(device: torch.device | str | int | None, sharing: int = 1) -> int:
    """What one of so many processes has."""
    if device is None:
        return sys.maxsize // sharing
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(shared_bytes() // sharing, own_bytes())
