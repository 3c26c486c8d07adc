"""Dry runs call the user's step; what it leaves in the modules is taken away again, without copying any tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from retime.mechanisms.memory.contents import Contents
from retime.mechanisms.memory.separability_state import random_state, set_random_state


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """All attributes of all modules come back as they were, with what dicts, lists, sets and deques in them hold.

    So do the global random generators of torch, Python and NumPy.

    For steps that run on stand-ins of parameters and buffers; a tensor in another attribute (a metric's state) must be
    replaced by the step and not written into. What other objects in attributes hold is not looked at.
    """
    random = random_state()
    contents = Contents()
    for module in model.modules():
        contents.note_all(module.__dict__)
    try:
        yield
    finally:
        set_random_state(random)
        contents.put_back()
