"""One layer of a recurrent network whose backward pass is a scan."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private.nn_and_optim import recurrent_kernels
from retime.mechanisms.scan.backward import Gradients, Saved, capturing, gradients_in_windows, ieee_products
from retime.mechanisms.scan.cells import Weights
from retime.mechanisms.scan.solvers import Solver, check_solver, choose_solver

# What a layer may be given. torch's kernels trust their arguments: a wrong shape ends the process, or reads past a
# tensor's memory, so all of it is checked before one is called.

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


# The forward pass: torch's own kernels, one layer a call.


def run_native(
    mode: str, x: Tensor, state: tuple[Tensor, ...], directions: tuple[Weights, ...], batch_sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Call what torch.nn calls for this layer, so that its values are torch.nn's bit for bit.

    Args:
        x: ``[T, B, I]``, or packed ``[N, I]`` with ``batch_sizes``.
        state: ``h0`` and, for LSTM, ``c0``: ``[D, B, H]`` each, ``D`` directions.
        directions: one direction's weights, or the forward and the reverse one's.

    Returns:
        Output ``[T, B, D * H]`` or ``[N, D * H]``, then the last states ``[D, B, H]``.
    """
    flat = tuple(weight for weights in directions for weight in weights if weight is not None)
    hx = state if mode == "LSTM" else state[0]
    kernel = getattr(recurrent_kernels, mode.lower())
    has_biases, two_ways = directions[0].input_bias is not None, len(directions) == 2
    if batch_sizes is None:
        results = kernel(x, hx, flat, has_biases, 1, 0.0, True, two_ways, False)
    else:
        results = kernel(x, batch_sizes, hx, flat, has_biases, 1, 0.0, True, two_ways)
    return tuple(results)


# Sequences of different lengths, packed as torch.nn.utils.rnn.PackedSequence packs them.


class Packing:
    """Place of each packed row among ``T`` steps and ``B`` sequences, longest first.

    Args:
        batch_sizes: how many sequences still run at each step: ``[T]``, int64, on the CPU.

    Raises:
        RuntimeError: while a CUDA graph is captured: its replays could not see other lengths.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        if capturing(device):
            raise RuntimeError(
                "packed sequences cannot be captured in a CUDA graph: where they end is copied from the host. Pad them "
                "to one length, or leave this layer out of the graph"
            )
        self.steps, self.batch = batch_sizes.shape[0], int(batch_sizes[0])
        running = torch.arange(self.batch).unsqueeze(0) < batch_sizes.unsqueeze(1)
        lengths = running.sum(0)
        steps = torch.arange(self.steps).unsqueeze(1)
        opposite = torch.where(running, lengths - 1 - steps, steps) * self.batch + torch.arange(self.batch)
        self._rows = running.flatten().nonzero().squeeze(1).to(device)
        self._last = ((lengths - 1) * self.batch + torch.arange(self.batch)).to(device)
        self._opposite = opposite.flatten().to(device)
        self._running = running.to(device)

    def pad(self, packed: Tensor) -> Tensor:
        """``[N, F]`` as ``[T, B, F]``, zero after each sequence's end."""
        padded = packed.new_zeros(self.steps * self.batch, packed.shape[-1])
        return padded.index_copy(0, self._rows, packed).view(self.steps, self.batch, -1)

    def pack(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` as ``[N, F]``: the inverse of :meth:`pad`."""
        return padded.flatten(0, 1).index_select(0, self._rows)

    def at_end(self, last: Tensor) -> Tensor:
        """A value a sequence, ``[B, F]``, put at its last step: ``[T, B, F]``, zero elsewhere."""
        series = last.new_zeros(self.steps * self.batch, last.shape[-1])
        return series.index_copy(0, self._last, last).view(self.steps, self.batch, -1)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """``[T, B, 1]``: one while a sequence runs, zero after its end."""
        return self._running.to(dtype).unsqueeze(-1)

    def flip(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` with every sequence from its last step to its first. Its own inverse."""
        return padded.flatten(0, 1).index_select(0, self._opposite).view_as(padded)

    def flip_packed(self, packed: Tensor) -> Tensor:
        """:meth:`flip` of packed data ``[N, F]``."""
        return self.pack(self.flip(self.pad(packed)))


# The autograd function: torch's own forward pass, and a backward pass that solves the affine scan.


class ScanFunction(torch.autograd.Function):
    """Saves the input, the first states, the output and the weights; no gates, and no cell states of an LSTM.

    Tensors: ``x``, ``h0`` ``[D, B, H]``, ``c0`` ``[D, B, H]`` or None, then four weights a direction (``D`` is 1 or 2).
    """

    @staticmethod
    def forward(
        mode: str,
        solver: Solver,
        batch_sizes: Tensor | None,
        x: Tensor,
        first: Tensor,
        first_cell: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if first_cell is None:
            return _without_records(mode, x, first, by_direction(weights), batch_sizes)
        x, first, first_cell = x.detach(), first.detach(), first_cell.detach()
        weights = tuple(None if weight is None else weight.detach() for weight in weights)
        with torch.enable_grad():  # oneDNN's LSTM rounds otherwise where gradients are off
            results = run_native(mode, x, (first, first_cell), by_direction(weights), batch_sizes)
        return tuple(result.detach() for result in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mode, ctx.solver, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "forward-mode derivatives cannot go through a layer solved by a scan: set solver='autograd' on the module, "
            "or convert_back the model, for this call"
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        batch_sizes, *inputs, output = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * (3 + len(inputs))
        with torch.autocast(output.device.type, enabled=False), ieee_products(output.device):
            of_inputs = _backward(ctx.mode, ctx.solver, batch_sizes, inputs, output, gradients)
        return (
            None,
            None,
            None,
            *(
                gradient.to(tensor.dtype) if wanted and tensor is not None and gradient is not None else None
                for gradient, tensor, wanted in zip(of_inputs, inputs, ctx.needs_input_grad[3:], strict=True)
            ),
        )


def _without_records(
    mode: str, x: Tensor, first: Tensor, weights: tuple[Weights, ...], batch_sizes: Tensor | None
) -> tuple[Tensor, ...]:
    """The forward pass of an RNN or a GRU, which needs no graph.

    On a CPU torch.nn makes some calls a step, and each is cheaper in inference mode than under no_grad. Not so under
    autocast, which may keep the weights it converts for later, nor with subclasses such as fake tensors: both would
    meet inference tensors where they expect ordinary ones.
    """
    if not x.is_cpu or type(x) is not Tensor or torch.is_autocast_enabled("cpu"):
        return run_native(mode, x, (first,), weights, batch_sizes)
    with torch.inference_mode():
        results = run_native(mode, x, (first,), weights, batch_sizes)
    return tuple(result.clone() for result in results)  # ordinary tensors, which a backward pass may save


def by_direction(weights: tuple[Tensor | None, ...]) -> tuple[Weights, ...]:
    """Four weights a direction."""
    return tuple(Weights(*weights[k : k + 4]) for k in range(0, len(weights), 4))  # type: ignore[arg-type]


def _backward(
    mode: str,
    solver: Solver,
    batch_sizes: Tensor | None,
    inputs: list[Tensor | None],
    output: Tensor,
    gradients: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    dtype = output.dtype
    for tensor in inputs:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    dtype = torch.promote_types(dtype, torch.float32)  # half precision is what nn rounds to, not what sums should use
    x, first, first_cell, *weights = (None if tensor is None else tensor.to(dtype) for tensor in inputs)
    assert x is not None
    assert first is not None
    packing = None if batch_sizes is None else Packing(batch_sizes, output.device)
    reached, *last = (None if gradient is None else gradient.to(dtype) for gradient in gradients)
    results = output.to(dtype)
    reached = torch.zeros_like(results) if reached is None else reached
    if packing is not None:
        x, results, reached = packing.pad(x), packing.pad(results), packing.pad(reached)
    mask = None if packing is None else packing.mask(dtype)
    directions = by_direction(tuple(weights))
    by_turn: list[Gradients] = []
    for d, (part, part_reached) in enumerate(
        zip(results.chunk(len(directions), -1), reached.chunk(len(directions), -1), strict=True)
    ):
        turn = _unchanged if d == 0 else _time_reversed if packing is None else packing.flip
        saved = Saved(
            mode, turn(x), first[d], None if first_cell is None else first_cell[d], turn(part), directions[d], mask
        )
        outside = [turn(part_reached), *(torch.zeros_like(part) for _ in last[1:])]
        for k, gradient in enumerate(last):
            if gradient is not None:
                outside[k] = _add_last(outside[k], gradient[d], packing)
        one = gradients_in_windows(solver, saved, outside)
        by_turn.append(one._replace(x=turn(one.x)))
    dx = by_turn[0].x if len(by_turn) == 1 else by_turn[0].x + by_turn[1].x
    return [
        dx if packing is None else packing.pack(dx),
        torch.stack([one.first for one in by_turn]),
        None if first_cell is None else torch.stack([one.first_cell for one in by_turn if one.first_cell is not None]),
        *(gradient for one in by_turn for gradient in one.weights),
    ]


def _add_last(series: Tensor, gradient: Tensor, packing: Packing | None) -> Tensor:
    """``series`` ``[T, B, H]`` with the gradient of the last state ``[B, H]`` added where each sequence ends."""
    if packing is not None:
        return series + packing.at_end(gradient)
    return torch.cat([series[:-1], (series[-1] + gradient).unsqueeze(0)])


def _unchanged(series: Tensor) -> Tensor:
    return series


def _time_reversed(series: Tensor) -> Tensor:
    return series.flip(0)


Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
LayerWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""``weight_ih`` ``[G * H, I]``, ``weight_hh`` ``[G * H, H]``, then both biases ``[G * H]`` (None: no bias)."""


def scan_layer(
    mode: str,
    x: Tensor,
    hx: Tensor | tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    *,
    reverse: bool = False,
    solver: str | Solver = "auto",
    batch_sizes: Tensor | None = None,
) -> Outputs:
    """Run one direction; differentiable in every tensor, any number of times.

    Args:
        mode: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"GRU"`` or ``"LSTM"``.
        x: ``[T, B, I]``; with ``batch_sizes`` the packed data ``[N, I]``, sorted by length.
        hx: ``h0`` ``[B, H]``; for LSTM ``(h0, c0)``.
        w_ih: ``[G * H, I]``, ``G`` 1, 3 or 4 gates in torch.nn's order.
        w_hh: ``[G * H, H]``.
        b_ih: ``[G * H]``; None, as ``b_hh``, for a layer without bias.
        reverse: from each sequence's last step to its first.
        solver: a name (``retime.mechanisms.scan.solvers.NAMES``), or an object with ``solve``.
        batch_sizes: as in PackedSequence: ``[T]``, int64, on the CPU.

    Returns:
        Output ``[T, B, H]`` (or ``[N, H]``), ``h_n`` ``[B, H]`` and, for LSTM, ``c_n`` ``[B, H]``.

    Raises:
        ValueError: for an unknown mode or solver, one bias without the other, shapes, dtypes or devices that do not fit
            together, or a layer that ``"triton"`` cannot run.
        ModuleNotFoundError: for ``"triton"`` where triton is not installed.
    """
    states, directions = hx if isinstance(hx, tuple) else (hx,), ((w_ih, w_hh, b_ih, b_hh),)
    check_layer(mode, x, states, directions, batch_sizes)
    state = tuple(part.unsqueeze(0) for part in states)
    opposite = _time_reversed if batch_sizes is None or not reverse else Packing(batch_sizes, x.device).flip_packed
    turn = opposite if reverse else _unchanged
    output, *last = _run(mode, turn(x), state, directions, solver, batch_sizes)
    return (turn(output), *(part.squeeze(0) for part in last))  # type: ignore[return-value]


def scan_bidirectional(
    mode: str,
    x: Tensor,
    hx: Tensor | tuple[Tensor, Tensor],
    weights: LayerWeights,
    reverse_weights: LayerWeights,
    *,
    solver: str | Solver = "auto",
    batch_sizes: Tensor | None = None,
) -> Outputs:
    """Run both directions in one native call: torch.nn's reverse half rounds otherwise than a reversed forward one.

    Parameters are those of :func:`scan_layer`, with a leading dimension of 2 in ``hx``: ``[2, B, H]``.

    Returns:
        Output ``[T, B, 2 * H]`` (or ``[N, 2 * H]``), ``h_n`` ``[2, B, H]`` and, for LSTM, ``c_n``.
    """
    state = hx if isinstance(hx, tuple) else (hx,)
    check_layer(mode, x, state, (weights, reverse_weights), batch_sizes)
    return _run(mode, x, state, (weights, reverse_weights), solver, batch_sizes)  # type: ignore[return-value]


def _run(
    mode: str,
    x: Tensor,
    state: tuple[Tensor, ...],
    directions: tuple[LayerWeights, ...],
    solver: str | Solver,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, ...]:
    check_solver(solver)
    flat = tuple(weight for weights in directions for weight in weights)
    chosen = None
    empty = state[0].numel() == 0  # no sequences: torch's own pass knows what to do with them
    if (
        not empty
        and torch.is_grad_enabled()
        and any(part is not None and part.requires_grad for part in (x, *state, *flat))
    ):
        chosen = choose_solver(solver, mode, x, state[0], batch_sizes)
    if chosen is None:
        return run_native(mode, x, state, by_direction(flat), batch_sizes)
    first_cell = state[1] if mode == "LSTM" else None
    results = ScanFunction.apply(  # type: ignore[no-untyped-call]
        mode, chosen, batch_sizes, x, state[0], first_cell, *flat
    )
    return tuple(results)
