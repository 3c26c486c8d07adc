"""Link rates in words: `2gbit`, `500mbit`, spelled as `tc` does (decimal units, bits)."""

import re

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST, MOST = 1e6, 100e9
"""Slower links would need minutes a step; faster ones no machine can shape."""


def parse_rate(text: str) -> float:
    """Bits per second.

    Raises:
        ValueError: not a number with kbit, mbit or gbit behind it, or out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if not found:
        raise ValueError(f"rate={text!r} is no link rate: write a number with kbit, mbit or gbit, as in rate=2gbit")
    bits = float(found[1]) * _UNITS[found[2]]
    if not LEAST <= bits <= MOST:
        raise ValueError(f"rate={text} is out of range: choose from {rate_text(LEAST)} to {rate_text(MOST)}")
    return bits


def rate_text(bits_per_second: float) -> str:
    """The rate with three digits: `2gbit`, `1.87gbit`, `250mbit`."""
    unit = next((name for name in ("gbit", "mbit") if bits_per_second >= _UNITS[name]), "kbit")
    return f"{bits_per_second / _UNITS[unit]:.3g}{unit}"
