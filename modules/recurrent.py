"""The common part of ScanRNN, ScanGRU and ScanLSTM: torch.nn's interface over `scan_layer`, one layer a call.

Shapes: T time steps, B batch, I input size, H hidden size, L layers, D directions (1 or 2), N = all steps of all packed
sequences.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.torch_private.nn_and_optim import (
    FLAT_WEIGHTS,
    FLAT_WEIGHTS_NAMES,
    flat_weights,
    flat_weights_names,
    weight_names,
)
from retime.mechanisms.scan import Solver, check_solver, keeps_torchs_own, scan_bidirectional, scan_layer
from retime.modules.inputs import Sequences, check_hidden, check_hidden_dtype, unpack

PLAIN_FORWARD: dict[str, Any] = {
    "RNN_TANH": nn.RNN.forward,
    "RNN_RELU": nn.RNN.forward,
    "GRU": nn.GRU.forward,
    "LSTM": nn.LSTM.forward,
}
MOST_LAYERS = 10_000
"""More would take minutes to make and deeper calls than Python has; such a number is a mistake."""
States = tuple[Tensor, ...]
"""What the layers start from or end with: (h,), or (h, c) for an LSTM, each `(L * D, B, H)`."""


class ScanRecurrent(nn.RNNBase):
    """A recurrent module whose backward pass through time is a parallel scan (BPPSA, Wang et al. 2020, section 3).

    Forward values equal torch.nn's, bit for bit on CPU (an LSTM in float64 with a strided input, as with `batch_first`,
    may round its last bit differently). Gradients equal autograd's up to rounding. Between layers dropout draws the
    random numbers that torch.nn draws on CPU; cuDNN's own are different.
    `torch.compile` runs these modules eagerly, as it does torch.nn's.
    """

    solver: str | Solver

    def __init__(self, mode: str, *sizes: Any, solver: str | Solver, **options: Any) -> None:
        check_solver(solver)
        if sizes[2] > MOST_LAYERS:
            raise ValueError(f"num_layers={sizes[2]}: give {MOST_LAYERS} at most; torch.nn would go on making weights")
        nn.RNNBase.__init__(self, mode, *sizes, **options)
        self.solver = solver

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Run all layers over `input`, `(T, B, I)`, `(B, T, I)` with `batch_first`, `(T, I)` or a PackedSequence.

        `hx` is `(L * D, B, H)` or, unbatched, `(L * D, H)`; a pair of them for an LSTM; zeros if left out.

        Returns:
            The last layer's output, `(T, B, D * H)` in the input's form, and the last states in the form of `hx`.

        Raises:
            RuntimeError: a shape that does not fit, as torch.nn reports it.
            ValueError: an input of another number of dimensions or another dtype than the weights.
        """
        plain_hx = hx is None or type(hx) is (tuple if self.mode == "LSTM" else Tensor)
        if torch.compiler.is_compiling() or not plain_hx or not self._is_plain(input):
            return self._scan(input, hx)
        return PLAIN_FORWARD[self.mode](self, input, hx)

    def _is_plain(self, input: Any) -> bool:
        """Return whether torch.nn's own call does all layers: then it costs nothing over torch.nn.

        On CUDA it would not: the weights lie in a block a layer (`flatten_parameters`).
        """
        if type(input) is not Tensor or not input.is_cpu or input.dim() != 3:
            return False
        if not torch.is_grad_enabled():
            return True
        if self.solver != "auto":
            return self.solver == "autograd"
        steps, batch = input.shape[:2]
        shape = torch.Size((batch, steps)) if self.batch_first else torch.Size((steps, batch))
        widths = [self.input_size, self.hidden_size * (2 if self.bidirectional else 1)][: self.num_layers]
        return all(keeps_torchs_own(self.mode, shape, self.hidden_size, width, input.dtype) for width in widths)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _scan(self, input: Any, hx: Any) -> Any:
        sequences = unpack(self, input)
        outputs, finals = self._layers(sequences, self._initial(sequences, hx))
        states = tuple(sequences.unsorted(final) for final in finals)
        return sequences.restored(outputs), states if self.mode == "LSTM" else states[0]

    def _initial(self, sequences: Sequences, hx: Any) -> States:
        """The states before the first step, in the order in which the sequences are sorted."""
        expected = (self.num_layers * (2 if self.bidirectional else 1), sequences.batch, self.hidden_size)
        if hx is None:
            zeros = torch.zeros(expected, dtype=sequences.data.dtype, device=sequences.data.device)
            return (zeros, zeros) if self.mode == "LSTM" else (zeros,)
        given = check_hidden(self, hx, batched=sequences.batched)
        if not sequences.batched:
            given = tuple(state.unsqueeze(1) for state in given)
        for number, state in enumerate(given):
            name = f"hidden[{number}]" if self.mode == "LSTM" else "hidden"
            self.check_hidden_size(state, expected, f"Expected {name} size {{}}, got {{}}")
        check_hidden_dtype(sequences.data, given)
        return tuple(sequences.sorted(state) for state in given)

    def _layers(self, sequences: Sequences, initial: States) -> tuple[Tensor, States]:
        outputs = sequences.data
        finals: list[States] = []
        for layer in range(self.num_layers):
            outputs, *final = self._layer(layer, outputs, initial, sequences.batch_sizes)
            finals.append(tuple(final))
            if layer < self.num_layers - 1:
                outputs = nn.functional.dropout(outputs, self.dropout, self.training)
        return outputs, tuple(torch.cat(states) for states in zip(*finals, strict=True))

    def _layer(self, layer: int, inputs: Tensor, initial: States, batch_sizes: Tensor | None) -> tuple[Tensor, ...]:
        """One layer in all its directions: output `(T, B, D * H)`, then its last states, each `(D, B, H)`."""
        if self.bidirectional:
            numbers = 2 * layer, 2 * layer + 1
            first, *cell = (state[numbers[0] : numbers[1] + 1] for state in initial)
            both = (self._weights(number) for number in numbers)
            hx = (first, cell[0]) if cell else first
            return scan_bidirectional(self.mode, inputs, hx, *both, solver=self.solver, batch_sizes=batch_sizes)
        first, *cell = (state[layer] for state in initial)
        hx = (first, cell[0]) if cell else first
        outputs, *final = scan_layer(
            self.mode, inputs, hx, *self._weights(layer), solver=self.solver, batch_sizes=batch_sizes
        )
        return (outputs, *(state.unsqueeze(0) for state in final))

    def _weights(self, number: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Weights and biases of one layer and direction, read by name: parametrizations and functional_call apply."""
        w_ih, w_hh, *biases = (getattr(self, name) for name in weight_names(self)[number])
        b_ih, b_hh = biases if biases else (None, None)
        return w_ih, w_hh, b_ih, b_hh

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Check as torch.nn's method does, and refuse integers under autocast too."""
        weight = getattr(self, weight_names(self)[0][0])
        if not input.is_floating_point() or not (
            input.dtype == weight.dtype or torch.is_autocast_enabled(input.device.type)
        ):
            raise ValueError(
                f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). "
                f"Convert input: input.to({weight.dtype}), or convert model: model.to(<input's dtype>)"
            )
        dimensions = 2 if batch_sizes is not None else 3
        if input.dim() != dimensions:
            raise RuntimeError(f"input must have {dimensions} dimensions, got {input.dim()}")
        if input.size(-1) != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {input.size(-1)}"
            )

    def flatten_parameters(self) -> None:
        """Give each layer's and direction's weights a block of memory of its own, as cuDNN wants them; else nothing.

        torch.nn makes one block of all layers, since it runs them in one call.
        """
        directions = 2 if self.bidirectional else 1
        if len(flat_weights(self)) != len(flat_weights_names(self)):
            return
        position = 0
        for number, names in enumerate(weight_names(self)):
            part = SimpleNamespace(
                mode=self.mode,
                input_size=self.input_size if number < directions else directions * self.hidden_size,
                hidden_size=self.hidden_size,
                num_layers=1,
                bias=self.bias,
                batch_first=False,
                bidirectional=False,
                proj_size=0,
                **{FLAT_WEIGHTS: flat_weights(self)[position : position + len(names)], FLAT_WEIGHTS_NAMES: names},
            )
            nn.RNNBase.flatten_parameters(part)  # type: ignore[arg-type]
            position += len(names)

    def extra_repr(self) -> str:
        solver = "" if self.solver == "auto" else f", solver={self.solver!r}"
        return super().extra_repr() + solver
