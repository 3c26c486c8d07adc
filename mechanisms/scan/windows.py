"""A layer's backward pass in windows of time on a CPU, so that what it works on stays in the cache."""

import torch
from torch import Tensor

from retime.mechanisms.scan.backward import Gradients, Saved, layer_gradients
from retime.mechanisms.scan.cells import Weights
from retime.mechanisms.scan.solver import Solver

WINDOW_BYTES = 4 * 1024 * 1024
"""Of one series ``[T, B, H]``; about six are alive at once, which a server's last-level cache holds."""
LEAST_STEPS = 256
"""Shorter windows would cost more in calls than the cache saves."""


def gradients_in_windows(solver: Solver, saved: Saved, outside: list[Tensor]) -> Gradients:
    """As :func:`layer_gradients`, from the last window to the first; each hands its carry to the one before.

    Memory beyond the input's gradient is that of one window. All at once: short sequences; other devices, which need
    every step side by side; an LSTM, whose cell states start from the first step; and under ``create_graph``.
    """
    window = window_steps(saved.output)
    steps = saved.output.shape[0]
    if saved.first_cell is not None or torch.is_grad_enabled() or not saved.output.is_cpu or steps <= window:
        return layer_gradients(solver, saved, outside)
    (reached,) = outside
    windows = -(-steps // window)
    edges = [steps * k // windows for k in range(windows + 1)]
    parts: list[Gradients] = []
    for start, stop in zip(edges[-2::-1], edges[:0:-1], strict=True):
        part = reached[start:stop]
        if parts:
            part = torch.cat([part[:-1], (part[-1] + parts[-1].first).unsqueeze(0)])
        parts.append(layer_gradients(solver, _narrow(saved, start, stop), [part]))
    sums = (torch.stack(one).sum(0) for one in zip(*(part.weights for part in parts), strict=True))
    return Gradients(torch.cat([part.x for part in reversed(parts)]), parts[-1].first, None, Weights(*sums))


def window_steps(series: Tensor) -> int:
    """Time steps of the longest window of a series ``[T, B, H]``."""
    return max(LEAST_STEPS, WINDOW_BYTES // max(1, series[0].nbytes))


def _narrow(saved: Saved, start: int, stop: int) -> Saved:
    return saved._replace(
        x=saved.x[start:stop],
        first=saved.first if start == 0 else saved.output[start - 1],
        output=saved.output[start:stop],
        mask=None if saved.mask is None else saved.mask[start:stop],
    )
