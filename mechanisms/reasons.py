"""Counts by reason, as reports keep and print them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["because"]


def because(counts: Mapping[str, int]) -> str:
    """What happened how often and why; ``"2 because it rained; 1 because ..."``."""
    return "; ".join(f"{count} because {reason}" for reason, count in counts.items())
