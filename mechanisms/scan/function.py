"""The autograd function: torch's own forward pass, and a backward pass that solves the affine scan."""

from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.scan.backward import Gradients, Saved
from retime.mechanisms.scan.cells import Weights
from retime.mechanisms.scan.ieee import ieee_products
from retime.mechanisms.scan.native import run_native
from retime.mechanisms.scan.packed import Packing
from retime.mechanisms.scan.solver import Solver
from retime.mechanisms.scan.windows import gradients_in_windows


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
            found = _backward(ctx.mode, ctx.solver, batch_sizes, inputs, output, gradients)
        return (
            None,
            None,
            None,
            *(
                gradient.to(tensor.dtype) if wanted and tensor is not None and gradient is not None else None
                for gradient, tensor, wanted in zip(found, inputs, ctx.needs_input_grad[3:], strict=True)
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
    found: list[Gradients] = []
    for d, (part, part_reached) in enumerate(
        zip(results.chunk(len(directions), -1), reached.chunk(len(directions), -1), strict=True)
    ):
        turn = _unchanged if d == 0 else _flip if packing is None else packing.flip
        saved = Saved(
            mode, turn(x), first[d], None if first_cell is None else first_cell[d], turn(part), directions[d], mask
        )
        outside = [turn(part_reached), *(torch.zeros_like(part) for _ in last[1:])]
        for k, gradient in enumerate(last):
            if gradient is not None:
                outside[k] = _add_last(outside[k], gradient[d], packing)
        one = gradients_in_windows(solver, saved, outside)
        found.append(one._replace(x=turn(one.x)))
    dx = found[0].x if len(found) == 1 else found[0].x + found[1].x
    return [
        dx if packing is None else packing.pack(dx),
        torch.stack([one.first for one in found]),
        None if first_cell is None else torch.stack([one.first_cell for one in found if one.first_cell is not None]),
        *(gradient for one in found for gradient in one.weights),
    ]


def _add_last(series: Tensor, gradient: Tensor, packing: Packing | None) -> Tensor:
    """``series`` ``[T, B, H]`` with the gradient of the last state ``[B, H]`` added where each sequence ends."""
    if packing is not None:
        return series + packing.at_end(gradient)
    return torch.cat([series[:-1], (series[-1] + gradient).unsqueeze(0)])


def _unchanged(series: Tensor) -> Tensor:
    return series


def _flip(series: Tensor) -> Tensor:
    return series.flip(0)
