"""Counts by reason, as reports print them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["because"]


def because(counts: Mapping[str, int], what: str = "") -> str:
    """How often something happened and why: ``"3 replanned because ...; 1 replanned because ..."``.

    Args:
        counts: by reason.
        what: happened, where the report has not said so before.
    """
    did = f" {what}" if what else ""
    return "; ".join(f"{count}{did} because {reason}" for reason, count in counts.items())
