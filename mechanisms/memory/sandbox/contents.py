"""What a model keeps beside its tensors, noted so that it can be put back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from retime.mechanisms.memory.sandbox.holdings import Holdings, Slots

__all__ = ["Contents"]

_LARGE_ARRAY = 2**20
"""NumPy arrays of more bytes are taken for data, which no step writes into."""


class Contents:
    """What containers held when they were noted, states of random generators, and entries of small arrays.

    The containers, generators and arrays themselves stay the same objects. What nothing has changed is not touched.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}
        self._restore: list[Callable[[], object]] = []

    def note(self, container: Any) -> None:
        """What a dict, list, set, deque or :class:`Slots` holds now; nothing if it was noted before."""
        if id(container) not in self._held:
            content = dict(container) if isinstance(container, dict | Slots) else list(container)
            self._held[id(container)] = container, content

    def note_all(self, holdings: Holdings) -> None:
        """Everything but tensors."""
        for container in holdings.containers:
            self.note(container)
        self._restore += map(_put_back_generator, holdings.generators)
        self._restore += [_put_back_array(array) for array in holdings.arrays if array.nbytes <= _LARGE_ARRAY]

    def put_back(self) -> None:
        """All is again as it was, and nothing is noted any more."""
        for container, content in self._held.values():
            if isinstance(container, dict | Slots):
                _put_back_items(container, content)
            elif not _same(container, content):
                container.clear()
                if isinstance(container, list | deque):
                    container.extend(content)
                else:
                    container.update(content)
        self._held.clear()
        for restore in self._restore:
            restore()
        self._restore.clear()


def _put_back_items(container: Any, content: dict[Any, Any]) -> None:
    """Never empty on the way: attributes may be asked for by another thread."""
    for key in [key for key in container if key not in content]:
        del container[key]
    for key, value in content.items():
        if key not in container or container[key] is not value:
            container[key] = value
    if isinstance(container, dict) and not _same(container, content):  # another order
        for key, value in content.items():
            del container[key]
            container[key] = value


def _same(container: Any, content: Any) -> bool:
    """The same objects in the same order; ``==`` would compare the entries of tensors."""
    return len(container) == len(content) and all(one is two for one, two in zip(container, content, strict=True))


def _put_back_generator(found: Any) -> Callable[[], object]:
    if isinstance(found, torch.Generator):
        return partial(found.set_state, found.get_state())
    if isinstance(found, random.Random):
        return partial(found.setstate, found.getstate())
    if hasattr(found, "set_state"):
        return partial(found.set_state, copy.deepcopy(found.get_state()))
    source = getattr(found, "bit_generator", found)
    return partial(setattr, source, "state", copy.deepcopy(source.state))


def _put_back_array(array: Any) -> Callable[[], None]:
    before = array.copy()

    def restore() -> None:
        if array.flags.writeable and array.tobytes() != before.tobytes():
            array[...] = before

    return restore
