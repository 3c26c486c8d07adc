"""What a model keeps beside its tensors, noted so that it can be put back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from retime.foundations.preserve_state.reachable_state import ReachableState, Slots

__all__ = ["Snapshot"]

_LARGE_ARRAY = 2**20
"""NumPy arrays of more bytes are taken for data, which no step writes into."""


class Snapshot:
    """What containers held when they were saved, states of random generators, and entries of small arrays.

    The containers, generators and arrays themselves stay the same objects. What nothing has changed is not touched.
    """

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._restore: list[Callable[[], object]] = []

    def save(self, container: Any) -> None:
        """What a dict, list, set, deque or :class:`Slots` holds now; nothing if it was saved before."""
        if id(container) not in self._containers:
            content = dict(container) if isinstance(container, dict | Slots) else list(container)
            self._containers[id(container)] = container, content

    def save_all(self, reachable: ReachableState) -> None:
        """Everything but tensors."""
        for container in reachable.containers:
            self.save(container)
        self._restore += map(_put_back_generator, reachable.generators)
        self._restore += [_put_back_array(array) for array in reachable.arrays if array.nbytes <= _LARGE_ARRAY]

    def put_back(self) -> None:
        """All is again as it was, and nothing is saved any more."""
        for container, content in self._containers.values():
            if isinstance(container, dict | Slots):
                _put_back_items(container, content)
            elif not _same(container, content):
                container.clear()
                if isinstance(container, list | deque):
                    container.extend(content)
                else:
                    container.update(content)
        self._containers.clear()
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
