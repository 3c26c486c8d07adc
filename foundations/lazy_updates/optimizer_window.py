"""Step the user's own optimizer for some of its parameters.

One optimizer object a parameter (the usual recipe) leaves the user's optimizer without state, and loses the
multi-tensor kernels. Here a *window* shares the optimizer's state and hyper-parameters and shows its ``step`` only the
parameters of one bucket. The user's object is never touched, so a failure or a second thread finds it whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.lazy_updates.fused_adam import FusedAdam
from retime.foundations.lazy_updates.per_parameter import raw_step
from retime.foundations.torch_private import sparse_indices, sparse_values


class OptimizerWindow:
    """A view of ``optimizer`` that can step a part of its parameters.

    With ``snapshot=True`` hyper-parameters are copied (tensor ones cloned, also ``grad_scale`` and ``found_inf`` which
    a GradScaler hangs on the optimizer), so later changes by a scheduler or the scaler do not reach this window.
    """

    def __init__(self, optimizer: Optimizer, *, snapshot: bool = False) -> None:
        self._step = raw_step(optimizer)
        window = object.__new__(type(optimizer))
        window.__dict__.update(optimizer.__dict__)
        window.__dict__.pop("step", None)
        window.__dict__.pop("zero_grad", None)
        self._window = window
        self._groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        if snapshot:
            self._groups = [{k: _copied(v) for k, v in group.items()} for group in self._groups]
            for name in ("grad_scale", "found_inf"):
                if name in window.__dict__:
                    window.__dict__[name] = _copied(window.__dict__[name])
        self._kernels = [FusedAdam.of(window, self._step, group) for group in self._groups]
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def holds(self, parameter: Tensor) -> bool:
        """Whether the optimizer updates this parameter."""
        return id(parameter) in self._group_of

    def update(self, parameters: Sequence[Tensor]) -> None:
        """Step these parameters, from their ``.grad``, with the kernels the optimizer would use for all of them."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update(parameters)
        else:  # inside a backward pass
            self._update(parameters)

    def _update(self, parameters: Sequence[Tensor]) -> None:
        if self._by_kernel(parameters):
            return
        members: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            members.setdefault(self._group_of[id(parameter)], []).append(parameter)
        self._window.param_groups = [{**self._groups[index], "params": members[index]} for index in sorted(members)]
        device = parameters[0].device.type
        if torch.is_autocast_enabled(device):  # the caller's, around its backward pass
            with torch.autocast(device, enabled=False):
                self._step(self._window)
        else:
            self._step(self._window)

    def _by_kernel(self, parameters: Sequence[Tensor]) -> bool:
        group = self._group_of[id(parameters[0])]
        kernel = self._kernels[group]
        if kernel is None or any(self._group_of[id(parameter)] != group for parameter in parameters):
            return False
        return kernel.update(parameters)

    def is_outdated(self, optimizer: Optimizer) -> bool:
        """Whether hyper-parameters of the groups seen here were changed since."""
        for mine, group in zip(self._groups, optimizer.param_groups, strict=False):
            for key, value in mine.items():
                now = group.get(key)
                if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor) or now != value):
                    return True
        return False


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(v) for v in value)
    return value


def nbytes(tensor: Tensor) -> int:
    """Bytes that ``tensor`` occupies (values and indices of a sparse one)."""
    if tensor.layout is torch.sparse_coo:
        return nbytes(sparse_values(tensor)) + nbytes(sparse_indices(tensor))
    return tensor.nbytes
