"""A forward pass that was stopped half-way, undone as far as it went through the model and the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state.model_state import random_state, set_random_state
from retime.foundations.preserve_state.reachable_state import ReachableState, replaced
from retime.foundations.preserve_state.snapshot import Snapshot
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import version_of

__all__ = ["Undo", "reachable_tensors"]


def reachable_tensors(model: nn.Module, batch: Any) -> list[Tensor]:
    """Each tensor of a model, beside its parameters and buffers too, and of a batch."""
    return _tensors_of(ReachableState(model.modules()), model, batch)


class Undo:
    """Notes what :func:`~retime.foundations.preserve_state.undisturbed.undisturbed` notes, and copies all tensors.

    Args:
        model: that is about to run.
        batch: that it is given.
        parameters: whether the model's parameters are copied too.
    """

    def __init__(self, model: nn.Module, batch: Any, *, parameters: bool = True) -> None:
        reachable = ReachableState(model.modules())
        self._random = random_state()
        self._snapshot = Snapshot()
        self._snapshot.save_all(reachable)
        left_out = set() if parameters else set(model.parameters())
        self._values = [
            (tensor, version_of(tensor), tensor.detach().clone())
            for tensor in _tensors_of(reachable, model, batch)
            if tensor not in left_out and not tensor.is_inference()  # those cannot be written into
        ]

    def put_back(self) -> None:
        """All is as it was when this was made; what has not changed is not touched."""
        set_random_state(self._random)
        self._snapshot.put_back()
        with torch.no_grad():
            for tensor, version, value in self._values:
                # Batch norm's kernels write into running statistics without a new version.
                unversioned = tensor.layout == torch.strided and not torch.equal(tensor, value)
                if version_of(tensor) != version or unversioned:
                    tensor.copy_(value)


def _tensors_of(reachable: ReachableState, model: nn.Module, batch: Any) -> list[Tensor]:
    found: list[Tensor] = [*model.parameters(), *model.buffers(), *tensors_in(batch)]

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for container, key in reachable.places:
        replaced(container[key], note)
    return list({id(tensor): tensor for tensor in found}.values())
