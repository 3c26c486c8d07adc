"""Dry runs call the user's step; what it leaves in the modules is taken away again, without copying any tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from retime.mechanisms.memory.separability_state import random_state, set_random_state


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """All attributes of all modules come back as they were, with the content of lists, dicts and sets in them.

    So do the global random generators of torch, Python and NumPy.

    For steps that run on stand-ins of parameters and buffers; a tensor in another attribute (a metric's state) must be
    replaced by the step and not written into.
    """
    random = random_state()
    before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        attributes = module.__dict__
        inner = {
            name: value.copy()
            for name, value in attributes.items()
            if isinstance(value, list | dict | set) and name not in ("_parameters", "_buffers", "_modules")
        }
        before.append((attributes, dict(attributes), inner))
    try:
        yield
    finally:
        set_random_state(random)
        for attributes, whole, inner in before:
            attributes.clear()
            attributes.update(whole)
            for name, content in inner.items():
                held = attributes[name]
                held.clear()
                if isinstance(held, list):
                    held.extend(content)
                else:
                    held.update(content)
