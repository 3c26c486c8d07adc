"""``Adam(fused=True)`` and ``AdamW(fused=True)`` for some parameters, by torch's own kernel and little else.

``Optimizer.step`` looks up anew what it can do, groups tensors and enters contexts, each time: some 30 us in caches
that hold it, and a multiple of that between gradients of several MB, which leave the caches nothing else. Optimizer
fusion calls it for each bucket. So where the step would end in this kernel, here it begins with it. The first use in a
process compares the bits with ``step``'s, in case a version of torch does something else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from retime.foundations.torch_private.engine import without_dispatch_modes
from retime.foundations.torch_private.nn_and_optim import INIT_GROUP, foreach_add, fused_adam_kernel

_STEP = inspect.unwrap(Adam.step)
_INIT_GROUP = inspect.unwrap(getattr(Adam, INIT_GROUP))  # torch.compile wraps it on first use
_PER_PARAMETER = ("exp_avg", "exp_avg_sq", "step")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class FusedAdam:
    """Updates parameters of one group by the fused kernel.

    Args:
        group: the hyper-parameters.
        state: of the optimizer, by parameter.
    """

    def __init__(self, group: Mapping[str, Any], state: Mapping[Any, Any]) -> None:
        self._state = state
        self._amsgrad: bool = group["amsgrad"]
        self._kernel = fused_adam_kernel(decoupled=group["decoupled_weight_decay"])
        beta1, beta2 = group["betas"]
        same = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
        self._options: dict[str, Any] = {**same, "beta1": beta1, "beta2": beta2, "grad_scale": None, "found_inf": None}

    @classmethod
    def of(cls, optimizer: Optimizer, step: Callable[..., Any], group: Mapping[str, Any]) -> FusedAdam | None:
        """What updates this group's parameters as ``step`` would; None where it would do more than call the kernel.

        Args:
            optimizer: whose state is used.
            step: its class's, without wrappers.
            group: one of its groups, or a copy.
        """
        kind = type(optimizer)
        if (
            kind not in (Adam, AdamW)
            or step is not _STEP
            or inspect.unwrap(getattr(kind, INIT_GROUP)) is not _INIT_GROUP
        ):
            return None
        if next((p.is_cuda for p in optimizer.state), False) and torch.cuda.is_current_stream_capturing():
            return None  # step has something to say
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return None
        numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
        if (
            group["fused"] is not True
            or group["differentiable"]
            or not all(isinstance(n, int | float) for n in numbers)
        ):
            return None
        return cls(group, optimizer.state) if "decoupled_weight_decay" in group and is_the_same_here() else None

    def update(self, parameters: Sequence[Tensor]) -> bool:
        """Step these parameters from their ``.grad``, with gradients switched off.

        Returns:
            Whether that was done; not where state is still to be made, or tensors are not all of one kind.
        """
        first = parameters[0]
        dtype, device = first.dtype, first.device
        if dtype not in _DTYPES:
            return False
        gradients, states = [], []
        for parameter in parameters:
            gradient, state = parameter.grad, self._state.get(parameter)
            if (
                not state
                or gradient is None
                or gradient.layout is not torch.strided
                or gradient.dtype is not dtype
                or parameter.dtype is not dtype
                or gradient.device != device
                or parameter.device != device
            ):
                return False
            gradients.append(gradient)
            states.append(state)
        averages, squares, steps = ([state[name] for state in states] for name in _PER_PARAMETER)
        largest = [state["max_exp_avg_sq"] for state in states] if self._amsgrad else []
        foreach_add(steps, 1)
        self._kernel(parameters, gradients, averages, squares, largest, steps, **self._options)
        return True


@functools.cache
def is_the_same_here() -> bool:
    """Whether ``step`` of this torch gives the bits that the kernel alone does: three steps of small optimizers."""
    with without_dispatch_modes():
        return all(
            _same(kind, amsgrad=amsgrad, maximize=maximize)
            for kind in (Adam, AdamW)
            for amsgrad in (False, True)
            for maximize in (False, True)
        )


def _same(kind: type[Adam], *, amsgrad: bool, maximize: bool) -> bool:
    values = torch.linspace(-1, 1, 12, dtype=torch.float32, device="cpu")
    ours, theirs = ([values.clone().requires_grad_(), values[:3].clone().requires_grad_()] for _ in range(2))
    optimizers = [
        kind(tensors, lr=0.1, weight_decay=0.1, fused=True, amsgrad=amsgrad, maximize=maximize)
        for tensors in (ours, theirs)
    ]
    for count in range(1, 4):
        for tensors in (ours, theirs):
            for tensor in tensors:
                tensor.grad = torch.sin(values[: len(tensor)] * count)
        if count == 1:
            optimizers[0].step()  # makes the state
        else:
            group = {key: value for key, value in optimizers[0].param_groups[0].items() if key != "params"}
            with torch.no_grad():
                FusedAdam(group, optimizers[0].state).update(ours)
        optimizers[1].step()
    states = [
        [optimizer.state[p] for p in tensors] for optimizer, tensors in zip(optimizers, (ours, theirs), strict=True)
    ]
    return all(map(torch.equal, ours, theirs)) and all(
        torch.equal(one[name], other[name]) for one, other in zip(*states, strict=True) for name in one
    )
