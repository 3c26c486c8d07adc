"""Measure a device and fit the cost model to it."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.scan.layer import GATES, scan_layer
from retime.mechanisms.scan.solvers import AUTOGRAD, TRITON, WAYS, CostModel, Shape
from retime.mechanisms.scan.triton_launch import why_not

# Fit the cost model's coefficients to measured times: least squares of relative errors, nothing negative.

SWEEPS = 20_000


def fit_coefficients(work: Sequence[Sequence[float]], times_us: Sequence[float]) -> tuple[float, ...]:
    """Coefficients whose products with each row of ``work`` come near each time, relative to it.

    Args:
        work: a row of :meth:`Shape.work` a measurement.
        times_us: microseconds, above 0.

    Returns:
        A coefficient, 0 or more, a column.
    """
    rows = [[amount / time for amount in row] for row, time in zip(work, times_us, strict=True)]
    columns = range(len(rows[0]))
    largest = [max(row[j] for row in rows) or 1.0 for j in columns]
    rows = [[amount / scale for amount, scale in zip(row, largest, strict=True)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    target = [sum(row[j] for row in rows) for j in columns]
    solution = [0.0 for _ in columns]
    for _ in range(SWEEPS):
        moved = 0.0
        for j in columns:
            if gram[j][j] == 0.0:
                continue
            slope = target[j] - sum(g * x for g, x in zip(gram[j], solution, strict=True))
            value = max(0.0, solution[j] + slope / gram[j][j])
            moved, solution[j] = max(moved, abs(value - solution[j])), value
        if moved < 1e-12:
            break
    return tuple(value / scale for value, scale in zip(solution, largest, strict=True))


MODES = {"RNN": "RNN_TANH", "GRU": "GRU", "LSTM": "LSTM"}
SHAPES = tuple(
    Shape(steps, batch, hidden, 8)
    for steps, batch, hidden in (
        (10, 1, 8), (30, 1, 20), (100, 1, 32), (1000, 1, 8), (300, 2, 8), (300, 4, 20), (30, 16, 64), (300, 16, 8),
        (300, 16, 20), (100, 16, 128), (100, 64, 32), (300, 1, 256), (30, 256, 32), (10, 256, 128),
    )
)  # fmt: skip
LARGEST_PRODUCTS = 20_000_000
"""Shapes with more than this many numbers in all Jacobians are not tried with solvers that multiply them."""


@checked
def calibrate(
    device: str | torch.device = "cpu",
    cells: Iterable[Literal["RNN", "GRU", "LSTM"]] = ("RNN", "GRU"),
    repeats: Annotated[int, AtLeast(1)] = 3,
) -> CostModel:
    """Time every way through the backward pass on ``device``: some seconds of an otherwise idle machine.

    On a GPU where the Triton kernels run they are one more way: only this lets "auto" choose them.
    Use the result with ``set_cost_model("cpu", calibrate("cpu"))``; it prints as a table to keep.

    Args:
        cells: ``"RNN"``, ``"GRU"``, ``"LSTM"`` (op by op, as packed sequences and float64 run).
    """
    device = torch.device(device)
    coefficients = {}
    for cell in cells:
        measured: dict[str, list[tuple[Shape, float]]] = {way: [] for way in (*WAYS, TRITON)}
        for shape in SHAPES:
            forward, steps = _time(cell, shape, device, repeats)
            for way, whole in steps.items():
                measured[way].append((shape, max(whole - forward, 1.0)))
        for way, points in measured.items():
            if not points:
                continue
            work, times = [shape.work(way) for shape, _ in points], [time_us for _, time_us in points]
            coefficients[f"{cell} {way}"] = fit_coefficients(work, times)
    return CostModel(coefficients)


def _time(cell: str, shape: Shape, device: torch.device, repeats: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a forward pass without gradients, and of a whole step each way, interleaved; medians."""
    dtype = torch.float64 if cell == "LSTM" and device.type == "cpu" else torch.float32  # float32 has a fused kernel
    batch, hidden, gates = int(shape.batch), shape.hidden, GATES[MODES[cell]]
    x = torch.randn(shape.steps, batch, shape.inputs, device=device, dtype=dtype)
    sizes = ((gates * hidden, shape.inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
    weights = [(torch.randn(size, device=device, dtype=dtype) * 0.1).requires_grad_() for size in sizes]
    first = torch.zeros(batch, hidden, device=device, dtype=dtype)
    gradient = torch.randn(shape.steps, batch, hidden, device=device, dtype=dtype)

    def forward(way: str) -> Tensor:
        hx = (first, first) if cell == "LSTM" else first
        return scan_layer(MODES[cell], x, hx, weights[0], weights[1], weights[2], weights[3], solver=way)[0]

    small = shape.steps * shape.batch * hidden**2 <= LARGEST_PRODUCTS
    ways = [way for way in WAYS if small or way in (AUTOGRAD, "sequential")]
    if small and why_not(MODES[cell], hidden, dtype, device) is None:
        ways.append(TRITON)
    plain: list[float] = []
    whole: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        with torch.no_grad():
            start = _now(device)
            forward(AUTOGRAD)
            plain += [_now(device) - start] * (repeat > 0)
        for way in ways:
            start = _now(device)
            torch.autograd.grad(forward(way), weights, gradient)
            whole[way] += [_now(device) - start] * (repeat > 0)
    return statistics.median(plain), {way: statistics.median(times) for way, times in whole.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e6
