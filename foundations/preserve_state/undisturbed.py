"""Dry runs call the user's step; what it leaves in the modules is taken away again, without copying any tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from retime.foundations.preserve_state.bound_names import BoundNames
from retime.foundations.preserve_state.model_state import random_state, set_random_state
from retime.foundations.preserve_state.reachable_state import ReachableState
from retime.foundations.preserve_state.snapshot import Snapshot


@contextmanager
def undisturbed(model: nn.Module, step: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """All attributes of all modules come back as they were, with what dicts, lists, sets and deques in them hold.

    So do the attributes of objects in them, small NumPy arrays, random generators that they keep, and the global ones
    of torch, Python and NumPy; see `ReachableState` for what is looked into.

    For steps that run on stand-ins of the tensors; a step that runs without must replace a tensor in an attribute (a
    metric's state) and not write into it.

    Args:
        step: what will run: names outside of the model that it binds anew are bound as they were again, too.
    """
    random = random_state()
    names = None if step is None else BoundNames(step, model)
    snapshot = Snapshot()
    snapshot.save_all(ReachableState(model.modules()))
    try:
        yield
    finally:
        set_random_state(random)
        snapshot.put_back()
        if names is not None:
            names.put_back()
