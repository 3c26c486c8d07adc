"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import numbers
import re
from fractions import Fraction
from typing import Any

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(name: str, size: int | str, *, least: int = 1, examples: str = "'8GiB' or '500MB'") -> int:
    """The whole number of bytes that an argument asks for.

    Args:
        name: the argument's, for errors.
        size: bytes, or a text: ``"8GiB"``, ``"500 MB"``, ``"1.5gib"``.
        least: the smallest number that can be meant.
        examples: what an error offers instead.

    Raises:
        TypeError: neither a whole number nor a text.
        ValueError: it cannot be read, or is too small.
    """
    given: Any = size  # one of numpy's whole numbers is no int, and may be too small to count with
    if isinstance(given, bool) or not isinstance(given, numbers.Integral | str):
        raise TypeError(f"{name}={size!r} must be a number of bytes, or a text such as {examples}")
    if isinstance(given, str):
        found = _FORM.fullmatch(given.strip())
        if not found:
            raise ValueError(f"{name}={size!r} cannot be read: write bytes, {examples}")
        count = int(Fraction(found[1]) * (_DECIMAL | _BINARY)[(found[2] or "B").lower()])
    else:
        count = int(given)
    if count < least:
        raise ValueError(f"{name}={size!r} must be {f'{least} or more' if least != 1 else 'above 0'}")
    return count


def show_bytes(count: float) -> str:
    """Bytes in the largest binary unit of which there is one."""
    for unit, size in reversed(_BINARY.items()):
        if count >= size:
            return f"{count / size:.4g} {unit[0].upper()}iB"
    return f"{count:.0f} B"
