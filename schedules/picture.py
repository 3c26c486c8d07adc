"""Timelines as text: one line a lane, for a terminal or a page of documentation."""

from __future__ import annotations

from collections.abc import Iterable

from retime.schedules.timeline import Span

MOST_CHARACTERS = 1000
"""A line that is longer says that `characters_per_ms` does not suit the timeline."""


def picture(spans: Iterable[Span], *, characters_per_ms: float = 3.0) -> str:
    """Draw ``spans`` as text: a lane a line, ``|`` where a task starts, dots where the lane waits.

    >>> from retime.schedules import reverse_first_k, simulate
    >>> ran = simulate(reverse_first_k(2, 2), {"F": 1, "O": 1, "W": 1, "S": 2}, {"S": "network"})
    >>> print(picture(ran.spans))
    compute  |F1|F2|O2|W1|W2|
    network   ...........|S1   |S2   |

    Args:
        spans: the boxes; those of one lane must not overlap. Instants (0 ms) are left out.
        characters_per_ms: the scale. A box that is too narrow for its name shows as much of the name as fits.

    Raises:
        ValueError: when the scale is no positive number, two boxes of a lane overlap, or a line would be longer than
            1000 characters.
    """
    if not characters_per_ms > 0:
        raise ValueError(f"characters_per_ms={characters_per_ms}: give a number above 0")
    lanes: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ms):
        lanes.setdefault(span.lane, [])
        if span.duration_ms > 0:
            lanes[span.lane].append(span)
    begin_ms = min((span.start_ms for boxes in lanes.values() for span in boxes), default=0.0)
    width = max(map(len, lanes), default=0)
    return "\n".join(
        f"{lane:{width}}  {_line(boxes, begin_ms, characters_per_ms)}".rstrip() for lane, boxes in lanes.items()
    )


def _line(boxes: list[Span], begin_ms: float, scale: float) -> str:
    line, free_ms = "", begin_ms
    for box in boxes:
        start, end = round((box.start_ms - begin_ms) * scale), round((box.end_ms - begin_ms) * scale)
        if box.start_ms < free_ms - 1e-9:
            raise ValueError(f"{box.name!r} starts before the box in front of it ends, on lane {box.lane!r}")
        if end > MOST_CHARACTERS:
            raise ValueError(f"characters_per_ms={scale}: {box.lane!r} would be {end} characters long; give less")
        if start > len(line):
            line = _closed(line, start)
        line = f"{line:{start}}"[:start] + f"|{box.name}"[: end - start].ljust(end - start)
        free_ms = box.end_ms
    return f"{line}|" if line else line


def _closed(line: str, start: int) -> str:
    """The line with a wait up to `start`."""
    return line + ("|" if line else " ") + "." * (start - len(line) - 1)
