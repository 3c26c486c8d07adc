"""What torch.nn's recurrent modules accept as input and hidden state, in one form; errors are torch.nn's own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

NAMES = {"RNN_TANH": "RNN", "RNN_RELU": "RNN", "GRU": "GRU", "LSTM": "LSTM"}


@dataclass(frozen=True)
class Sequences:
    """Sequences as `scan_layer` takes them, and the way back to the form in which they came.

    Attributes:
        data: `(T, B, I)`, or `(N, I)` if they were packed.
        batch: B.
        batch_sizes: how many sequences reach each step, if they were packed.
        order, inverse: how packed sequences were sorted by length, and the way back; None if they came sorted.
        batched: whether the input had a batch dimension.
        batch_first: whether the output has the batch before the time.
    """

    data: Tensor
    batch: int
    batch_sizes: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    batched: bool = True
    batch_first: bool = False

    def sorted(self, state: Tensor) -> Tensor:
        """A state `(L * D, B, H)` in the sequences' order."""
        return state if self.order is None else state.index_select(1, self.order)

    def unsorted(self, state: Tensor) -> Tensor:
        """A state in the caller's order, without the batch dimension if the input had none."""
        if not self.batched:
            return state.squeeze(1)
        return state if self.inverse is None else state.index_select(1, self.inverse)

    def restored(self, outputs: Tensor) -> Tensor | PackedSequence:
        """The last layer's outputs in the input's form."""
        if self.batch_sizes is not None:
            return PackedSequence(outputs, self.batch_sizes, self.order, self.inverse)
        if not self.batched:
            return outputs.squeeze(1)
        return outputs.transpose(0, 1) if self.batch_first else outputs


def unpack(module: nn.RNNBase, input: Tensor | PackedSequence) -> Sequences:
    """`input` in `module`'s conventions as `Sequences`.

    Raises:
        TypeError: neither a tensor nor a PackedSequence.
        ValueError, RuntimeError: torch.nn's own, for a wrong shape or dtype.
    """
    name = NAMES[module.mode]
    if isinstance(input, PackedSequence):
        data, batch_sizes, order, inverse = input
        module.check_input(data, batch_sizes)
        return Sequences(data, int(batch_sizes[0]), batch_sizes, order, inverse)
    if not isinstance(input, Tensor):
        raise TypeError(f"Scan{name}: input is a {type(input).__name__}; give a tensor or a PackedSequence")
    if input.dim() not in (2, 3):
        raise ValueError(f"{name}: Expected input to be 2D or 3D, got {input.dim()}D tensor instead")
    batched = input.dim() == 3
    input = input if batched else input.unsqueeze(1)
    module.check_input(input, None)
    data = input.transpose(0, 1) if batched and module.batch_first else input
    if not data.size(0):
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    return Sequences(data, data.size(1), batched=batched, batch_first=module.batch_first)


def check_hidden(module: nn.RNNBase, hx: Any, *, batched: bool) -> tuple[Tensor, ...]:
    """The given hidden state as a tuple of one tensor, or of two for an LSTM.

    Raises:
        TypeError: an LSTM's is no pair of tensors, or another module's no tensor.
        RuntimeError: another number of dimensions than the input asks for.
    """
    dimensions, kind = (3, "batched 3-D") if batched else (2, "unbatched 2-D")
    if module.mode == "LSTM":
        pair = isinstance(hx, tuple | list) and len(hx) == 2 and all(isinstance(state, Tensor) for state in hx)
        if not pair:
            raise TypeError(f"ScanLSTM: hx is a {type(hx).__name__}; give the pair (h_0, c_0)")
        if any(state.dim() != dimensions for state in hx):
            raise RuntimeError(
                f"For {kind} input, hx and cx should also be {dimensions}-D but got "
                f"({hx[0].dim()}-D, {hx[1].dim()}-D) tensors"
            )
        return tuple(hx)
    if not isinstance(hx, Tensor):
        raise TypeError(f"Scan{NAMES[module.mode]}: hx is a {type(hx).__name__}; give one tensor, h_0")
    if hx.dim() != dimensions:
        raise RuntimeError(f"For {kind} input, hx should also be {dimensions}-D but got {hx.dim()}-D tensor")
    return (hx,)


def check_hidden_dtype(data: Tensor, states: tuple[Tensor, ...]) -> None:
    """Raise a ValueError if a state has another dtype than the input (autocast may mix them)."""
    for state in states:
        if state.dtype != data.dtype and not torch.is_autocast_enabled(data.device.type):
            raise ValueError(f"hx has dtype {state.dtype}, the input {data.dtype}: convert hx with hx.to({data.dtype})")
