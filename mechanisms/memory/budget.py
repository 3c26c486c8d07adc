"""A byte budget, as people write it."""

from __future__ import annotations

import re
import sys

import torch

from retime.mechanisms.memory.cpu_limits import own_bytes, shared_bytes

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


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
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise TypeError(f"budget={budget!r} must be a number of bytes, or a text such as '8GiB' or '90%'")
    total = _device_bytes(device)
    if isinstance(budget, int):
        wanted = budget
    else:
        found = _FORM.fullmatch(budget.strip())
        if not found:
            raise ValueError(f"budget={budget!r} cannot be read: write bytes, '8GiB', '500MB' or '90%'")
        number, unit = float(found[1]), (found[2] or "B").lower()
        if unit == "%":
            wanted = int(number / 100 * _device_bytes(device, sharing))
        else:
            wanted = int(number * (_UNITS | _BINARY)[unit])
    if wanted < 1:
        raise ValueError(f"budget={budget!r} must be above 0")
    if wanted > total:
        raise ValueError(f"budget={budget!r} is {wanted} bytes, but {device} has {total}: give at most that, or '90%'")
    return wanted


def show_bytes(count: float) -> str:
    """Bytes in the largest binary unit of which there is one."""
    for unit, size in reversed(_BINARY.items()):
        if count >= size:
            return f"{count / size:.4g} {unit[0].upper()}iB"
    return f"{count:.0f} B"


def _device_bytes(device: torch.device | str | int | None, sharing: int = 1) -> int:
    """What one of so many processes has."""
    if device is None:
        return sys.maxsize // sharing
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(shared_bytes() // sharing, own_bytes())
