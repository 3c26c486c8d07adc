"""Private names of ``torch.nn`` and ``torch.optim``: bases of layers, hooks, recurrent layers' weights, kernels.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from retime.foundations.torch_private import attribute, needed_by

with needed_by("the memory budget, which keeps batches whole that BatchNorm counts over,"):
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
"""The base of all BatchNorm layers."""

with needed_by("vDNN, the memory budget's peer, to find convolutions,"):
    from torch.nn.modules.conv import _ConvNd as ConvBase
"""The base of all convolutions."""

_plain, _recurrent = nn.Module(), nn.RNN(1, 1, device="meta")

_READERS = "fusion and out-of-order weight gradients, which must see hooks that read weights or gradients,"
backward_hooks: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attribute(
    _plain, ("_backward_hooks", "_backward_pre_hooks"), _READERS
)
"""What ``register_full_backward_hook`` and others of its kind put on a module."""

global_backward_hooks: Callable[[], tuple[dict[int, Any], ...]] = partial(
    attribute(_module, ("_global_backward_hooks", "_global_backward_pre_hooks"), _READERS), _module
)
"""The hooks of all modules' backward passes; torch may bind them anew, so they are read by name at each call."""

global_forward_hooks: Callable[[], tuple[dict[int, Any], ...]] = partial(
    attribute(
        _module,
        ("_global_forward_hooks", "_global_forward_pre_hooks"),
        "CUDA graphs of two streams, which run no hooks,",
    ),
    _module,
)
"""The hooks of all modules' forward passes, as :data:`global_backward_hooks`."""

forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attribute(
    _plain, "_forward_pre_hooks", "ScanSequential, which runs no layer by a scan that has hooks,"
)
"""What ``register_forward_pre_hook`` put on a module."""

forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attribute(
    _plain, "_forward_hooks", "ScanSequential, which runs no layer by a scan that has hooks,"
)
"""What ``register_forward_hook`` put on a module."""

own_parameters: Callable[[nn.Module], dict[str, Any]] = attribute(
    _plain, "_parameters", "out-of-order weight gradients, to put stand-ins in a layer's parameters' places,"
)
"""A module's own parameters by name, the dictionary itself."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(
    _plain, "_buffers", "the memory budget's batchnorm='ghost', to give a layer statistics for a dry run,"
)
"""A module's own buffers by name, the dictionary itself."""

_CONVERSION = "converted recurrent layers (ScanRNN, ScanGRU, ScanLSTM)"
FLAT_WEIGHTS, FLAT_WEIGHTS_NAMES = "_flat_weights", "_flat_weights_names"
"""What ``nn.RNNBase.flatten_parameters`` reads, for objects made for it alone."""

flat_weights: Callable[[nn.RNNBase], list[Tensor]] = attribute(_recurrent, FLAT_WEIGHTS, _CONVERSION)
"""A recurrent layer's weights in the order in which torch's kernels take them."""

flat_weights_names: Callable[[nn.RNNBase], list[str]] = attribute(_recurrent, FLAT_WEIGHTS_NAMES, _CONVERSION)
"""Their names, in that order."""

weight_names: Callable[[nn.RNNBase], list[list[str]]] = attribute(_recurrent, "_all_weights", _CONVERSION)
"""The names of the weights and biases of each layer and direction."""

with needed_by(_CONVERSION):
    recurrent_kernels: Any = torch._VF
"""torch's own kernels of recurrent layers: ``rnn_tanh``, ``rnn_relu``, ``gru``, ``lstm``."""


_HOOKS = "fusion and the memory budget's dry run, which must see an optimizer's step hooks,"

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where an optimizer keeps its step hooks: attributes that are dictionaries."""

INIT_GROUP = "_init_group"
"""The method by which torch's optimizers collect parameters and make their state; forward fusion asks whose it is."""

_some = torch.optim.SGD([torch.empty(0, device="meta")])
attribute(_some, INIT_GROUP, "fusion, to tell torch's own optimizers from others,")

step_hooks: Callable[[Optimizer], tuple[dict[int, Any], ...]] = attribute(_some, STEP_HOOKS, _HOOKS)
"""What ``register_step_pre_hook`` and ``register_step_post_hook`` put on an optimizer."""

_global_hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
global_step_hooks: Callable[[], tuple[dict[int, Any], ...]] = partial(
    attribute(_optimizer, _global_hooks, _HOOKS), _optimizer
)
"""The hooks of all optimizers' steps; torch may bind them anew, so they are read by name at each call."""


with needed_by("backward fusion, to clip by value as torch does,"):
    foreach_clamp_min, foreach_clamp_max = torch._foreach_clamp_min_, torch._foreach_clamp_max_
"""Clamp lists of tensors in place: the kernels of ``torch.nn.utils.clip_grad_value_``."""

with needed_by("the recipe that measures where gradients lie"):
    fused_adamw = torch._fused_adamw_
"""The kernel of ``AdamW(fused=True)``."""

with needed_by("optimizer fusion, which calls the kernel of Adam(fused=True) bucket by bucket,"):
    foreach_add = torch._foreach_add_
    torch._fused_adam_, torch._fused_adamw_  # noqa: B018
"""Adds to each tensor of a list in place."""


def fused_adam_kernel(*, decoupled: bool) -> Callable[..., Any]:
    """The kernel of ``Adam(fused=True)``, or of ``AdamW(fused=True)`` where weight decay is ``decoupled``."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_


with needed_by("forward fusion, which brings parameters up to date before TorchScript reads them,"):
    SCRIPTED: tuple[type, ...] = torch._C.ScriptFunction, torch._C.ScriptMethod
"""What ``torch.jit.script`` and ``torch.jit.trace`` make of functions and of methods."""

with needed_by("forward fusion, whose updates are to run by the kernels that optimizer.step() would choose,"):
    foreach_classes: list[Any] = _optimizer._foreach_supported_types
"""The exact classes of parameters for which optimizers choose multi-tensor kernels; others may be added."""
