"""What a layer may be given. torch's kernels trust their arguments: a wrong shape ends the process, or reads past a
tensor's memory, so all of it is checked before one is called."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
NAMES = ("w_ih", "w_hh", "b_ih", "b_hh")


def check_layer(
    mode: Any, x: Any, state: tuple[Any, ...], directions: tuple[tuple[Any, ...], ...], batch_sizes: Any
) -> None:
    """Refuse what does not fit together.

    Args:
        state: ``h0`` and, for LSTM, ``c0``: ``[B, H]``, or ``[2, B, H]`` with two directions.

    Raises:
        TypeError: an argument that has to be a tensor is none.
        ValueError: an unknown mode, one bias without the other, or a shape, dtype or device that does not fit.
    """
    if mode not in GATES:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(GATES)}")
    _check_tensor("x", x)
    packed = batch_sizes is not None
    if x.dim() != (2 if packed else 3) or not x.is_floating_point():
        wanted = "[N, I] with batch_sizes" if packed else "[T, B, I]"
        raise ValueError(f"x is {_form(x)}: give floating-point numbers {wanted}")
    if x.shape[0] == 0 or x.shape[-1] == 0:
        raise ValueError(f"x is {_form(x)}: a layer needs one time step and one input feature at least")
    batch = check_batch_sizes(batch_sizes, x.shape[0]) if packed else x.shape[1]
    if len(state) != (2 if mode == "LSTM" else 1):
        raise ValueError(f"hx has {len(state)} tensors: {mode} takes {'(h0, c0)' if mode == 'LSTM' else 'h0 alone'}")
    _check_tensor("hx", state[0])
    lead = (2,) if len(directions) == 2 else ()
    hidden = state[0].shape[-1] if state[0].dim() == len(lead) + 2 else 0
    if hidden == 0:
        raise ValueError(f"hx is {_form(state[0])}: give [{'2, ' if lead else ''}B, H], H the hidden size, 1 or more")
    for part in state:
        _check_part("hx", part, (*lead, batch, hidden), x)
    rows = GATES[mode] * hidden
    shapes = ((rows, x.shape[-1]), (rows, hidden), (rows,), (rows,))
    for weights in directions:
        if len(weights) != 4:
            raise ValueError(f"{len(weights)} weights: give w_ih, w_hh, b_ih and b_hh (None: no bias) a direction")
        if (weights[2] is None) != (weights[3] is None):
            raise ValueError("one of b_ih and b_hh is None: give both, or neither")
        for name, weight, shape in zip(NAMES, weights, shapes, strict=True):
            if weight is not None or name.startswith("w"):
                _check_part(name, weight, shape, x)


def check_batch_sizes(batch_sizes: Any, rows: int) -> int:
    """Refuse ``batch_sizes`` that are not those of ``rows`` packed rows; returns ``B``."""
    _check_tensor("batch_sizes", batch_sizes)
    if batch_sizes.dim() != 1 or batch_sizes.dtype != torch.int64 or not batch_sizes.is_cpu or not len(batch_sizes):
        raise ValueError(
            f"batch_sizes is {_form(batch_sizes)} on {batch_sizes.device}: give [T], torch.int64, on the CPU"
        )
    sizes = batch_sizes.tolist()
    if sizes[-1] < 1 or any(later > sooner for sooner, later in pairwise(sizes)):
        raise ValueError("batch_sizes has to fall from step to step, or stay, and be 1 or more: sort by length")
    if sum(sizes) != rows:
        raise ValueError(f"batch_sizes add up to {sum(sizes)}, but x has {rows} rows")
    return int(sizes[0])


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} has to be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {value.layout}: give a dense tensor")


def _check_part(name: str, value: Any, shape: tuple[int, ...], x: Tensor) -> None:
    _check_tensor(name, value)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has the shape {list(value.shape)}: for this x and hx it has to be {list(shape)}")
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, x on {x.device}: put them on one device")
    if value.dtype != x.dtype and not (value.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(f"{name} has the dtype {value.dtype}, x {x.dtype}: give them one dtype")


def _form(value: Tensor) -> str:
    return f"{list(value.shape)} {value.dtype}"
