"""Private names of ``torch.nn``: bases of layers, hooks on modules, and what recurrent layers keep.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from retime.foundations.torch_private.missing import attribute, needed_by

__all__ = [
    "BatchNormBase",
    "ConvBase",
    "FLAT_WEIGHTS",
    "FLAT_WEIGHTS_NAMES",
    "own_buffers",
    "flat_weights",
    "flat_weights_names",
    "forward_hooks",
    "forward_pre_hooks",
    "backward_hooks",
    "global_backward_hooks",
    "global_forward_hooks",
    "own_parameters",
    "recurrent_kernels",
    "weight_names",
]

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
