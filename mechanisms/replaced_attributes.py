"""Other attributes for one object, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """While open, ``owner`` itself has these attributes, methods of its class included; then what it had before."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
