"""Counts what a forward pass allocates while it is trained for real: its numbers stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retime.foundations.preserve_state import Onlooker
from retime.foundations.torch_private import storage_address, tree_leaves

__all__ = ["AllocatedBytes", "TooMuchAllocated"]


class TooMuchAllocated(BaseException):  # no error: the caller goes another way. A step's own `except` lets it by
    """The forward pass has allocated more than it may."""


class AllocatedBytes(Onlooker):  # type: ignore[no-untyped-call]
    """While open, adds up the storages that operations make, as though none of them was ever freed.

    So a segment under activation checkpointing counts with what its backward pass makes again.

    Args:
        most: raise :class:`TooMuchAllocated` as soon as there is more; None never does.

    Attributes:
        bytes: of all storages so far.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.bytes = 0
        self._most = most

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if made:
            known = {_storage(leaf)[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.bytes += sum(nbytes for key, nbytes in dict(map(_storage, made)).items() if key not in known)
            if self._most is not None and self.bytes > self._most:
                raise TooMuchAllocated
        return out


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Key and size of a tensor's storage; by itself where it has none to ask for."""
    try:
        storage: torch.UntypedStorage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage_address(storage), int(storage.nbytes())
