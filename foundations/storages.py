"""Tensors seen as windows on storages: what is compared, moved and counted is the storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.patching import replaced_attributes
from retime.foundations.torch_private.engine import FakeTensor, dispatch_mode_count, tree_leaves, without_dispatch_modes
from retime.foundations.torch_private.tensors import is_functorch_wrapped, neg_view, storage_address

_LAYERS = 4  # of objects that hold objects
_NO_TENSORS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
# A subclass may keep its data elsewhere, or need its own methods to be put together again.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """The same number for all tensors on one storage, as long as the storage lives."""
    return int(storage_address(tensor.untyped_storage()))


def has_storage(tensor: Tensor) -> bool:
    """Return whether the tensor is a strided window on one storage, with nothing hidden beside it."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not is_functorch_wrapped(tensor)
    )


def tensors_in(tree: object) -> list[Tensor]:
    """All tensors of a batch, a state or an optimizer, however nested, also in attributes of objects that hold some."""
    tensors: list[Tensor] = []
    layer: list[object] = [tree]
    for _ in range(_LAYERS):
        leaves = [leaf for leaf in tree_leaves(layer) if not isinstance(leaf, _NO_TENSORS)]
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        layer = [member for leaf in leaves if not isinstance(leaf, Tensor) for member in _held_by(leaf)]
        if not layer:
            break
    return tensors


def _held_by(leaf: object) -> list[object]:
    """Content of a container that torch's pytrees do not know, such as a mapping of tokens or a dataclass."""
    return list((leaf if isinstance(leaf, Mapping) else attributes_of(leaf)).values())


def attributes_of(leaf: object) -> dict[str, Any]:
    """Attributes that an object that is no container and no code keeps under names, in slots too."""
    if isinstance(leaf, type | nn.Module | Tensor) or callable(leaf):
        return {}
    slots = chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(leaf).__mro__)
    names = [name for name in slots if name != "__weakref__" and hasattr(leaf, name)]
    return {**getattr(leaf, "__dict__", {}), **{name: getattr(leaf, name) for name in names if name != "__dict__"}}


def strided_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted by itself; a sparse one has none to ask for."""
    return sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """Keys of all storages behind ``tensors``; tensors without a storage of their own are passed over."""
    return {storage_key(tensor) for tensor in tensors if has_storage(tensor)}


@dataclass(frozen=True)
class Window:
    """View of a tensor on its storage: dtype, size and stride in elements, and the two lazy flags."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Window:
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
        """The same window on another storage of ``device``; the result has no history.

        Fake storages say that they are on the meta device, so the device is asked for. In a dry run too constants that
        nothing stands in for are real.
        """
        real = storage.device.type != "meta" and dispatch_mode_count()
        with torch.no_grad(), without_dispatch_modes() if real else nullcontext():
            tensor = torch.empty(0, dtype=self.dtype, device=device)
            # the mode of fake tensors remembers arguments of operations, and would hold the storage for ever
            mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
            with nullcontext() if mode is None else replaced_attributes(mode, cache_enabled=False):
                tensor.set_(storage, self.offset, self.size, self.stride)
            if self.conjugate:
                tensor = tensor.conj()
            return neg_view(tensor) if self.negative else tensor
