"""A forward pass that was stopped half-way, undone as far as it went through the model and the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state.outside import GlobalsSnapshot
from retime.foundations.preserve_state.state import ReachableState, Snapshot, random_state, replaced, set_random_state
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import version_of

# Dry runs call the user's step; what it leaves in the modules is taken away again, without copying any tensor.


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
    names = None if step is None else GlobalsSnapshot(step, model)
    snapshot = Snapshot()
    snapshot.save_all(ReachableState(model.modules()))
    try:
        yield
    finally:
        set_random_state(random)
        snapshot.put_back()
        if names is not None:
            names.put_back()


def reachable_tensors(model: nn.Module, batch: Any) -> list[Tensor]:
    """Each tensor of a model, beside its parameters and buffers too, and of a batch."""
    return _tensors_of(ReachableState(model.modules()), model, batch)


class Undo:
    """Notes what :func:`~retime.foundations.preserve_state.undo.undisturbed` notes, and copies all tensors.

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
