"""What dicts, lists, sets and deques hold, noted so that it can be put back."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Contents", "is_container"]


def is_container(value: Any) -> bool:
    """Whether what it holds can change."""
    return isinstance(value, dict | list | set | deque)


class Contents:
    """What containers held when they were noted, each once; the containers themselves stay the same objects."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}

    def note(self, container: Any) -> Any:
        """What it holds now, as a dict or a list of its own; None if it was noted before."""
        if id(container) in self._held:
            return None
        content = dict(container) if isinstance(container, dict) else list(container)
        self._held[id(container)] = container, content
        return content

    def note_all(self, value: Any) -> None:
        """A container, and those in it or in a tuple, however deep."""
        waiting = [value]
        while waiting:
            found = waiting.pop()
            if isinstance(found, tuple):
                waiting.extend(found)
            elif is_container(found):
                content = self.note(found) or ()
                waiting.extend(content.values() if isinstance(content, dict) else content)

    def put_back(self) -> None:
        """All of them hold again what they held, and nothing is noted any more."""
        for container, content in self._held.values():
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)
        self._held.clear()
