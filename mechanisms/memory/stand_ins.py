"""Other tensors in the places of a model's, for a while: fake ones for a dry run, copies for a run that must not count.

The tensors are swapped in the module itself, so that whatever closes over it (a loss function, a Trainer) runs on the
stand-ins too, and nothing has to be copied that cannot be.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from retime.mechanisms.memory.split import replaced_tensors


class Replacement:
    """The same stand-in for the same tensor, wherever it is found."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # the original too: its id must stay taken

    def of(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is None:
            stand_in = self._convert(tensor)
            stand_in.grad = None
            known = self._known[id(tensor)] = tensor, stand_in
        return known[1]

    def tree(self, tree: Any) -> Any:
        """A state with all its tensors replaced."""
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def batch(self, batch: Any) -> Any:
        """A batch with all its tensors replaced, which a step may write into."""
        return replaced_tensors(batch, self.of)


def fake(mode: FakeTensorMode) -> Replacement:
    """Stand-ins without data, of the same sizes, on the same device."""

    def convert(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor if tensor.is_leaf else tensor.detach(), static_shapes=True)

    return Replacement(convert)


def copies() -> Replacement:
    """Stand-ins with the same values."""
    return Replacement(lambda tensor: _twin(tensor, tensor.detach().clone()))


def channels_last() -> Replacement:
    """Stand-ins with the same values; images, and weights that are applied to them, with their channels last."""

    def convert(tensor: Tensor) -> Tensor:
        layout = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
        return _twin(tensor, tensor.detach().clone(memory_format=layout))

    return Replacement(convert)


def _twin(tensor: Tensor, twin: Tensor) -> Tensor:
    """A copy made the same kind of tensor as the original."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad) if tensor.is_leaf else twin


def aliases() -> Replacement:
    """Stand-ins with the same values; parameters share their memory, and have gradients of their own."""
    rest = copies()

    def alias(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        return rest.of(tensor)

    return Replacement(alias)


@contextmanager
def stand_ins(module: nn.Module, replacement: Replacement) -> Iterator[None]:
    """Parameters and buffers of ``module`` are replaced; at the end the originals are back, untouched."""
    originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    try:
        for child in module.modules():
            for tensors in (child._parameters, child._buffers):
                originals.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = replacement.of(tensor)  # type: ignore[assignment]
        for layer in recurrent:
            _relist(layer)
        yield
    finally:
        for tensors, before in originals:
            tensors.update(before)
        for layer in recurrent:
            _relist(layer)


def stand_in_optimizer(optimizer: torch.optim.Optimizer, replacement: Replacement) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings over the stand-ins, without hooks or a scheduler's wrapper."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # schedulers put a counting wrapper there, bound to the original
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    twin.param_groups = [
        {key: replacement.tree(value) for key, value in group.items()} for group in optimizer.param_groups
    ]
    states = {replacement.of(parameter): replacement.tree(state) for parameter, state in optimizer.state.items()}
    twin.state = defaultdict(dict, states)
    return twin


def _relist(layer: nn.RNNBase) -> None:
    """Recurrent layers keep a list of their parameters beside the parameters."""
    layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
