"""The speedup formula of the optimizer-fusion paper (appendix C.2), fitted to measured step times.

    s(b) = (b t_grad + t_opt) / (b t_grad + t_opt - t_saved)

b is the batch size, t_grad forward and backward per sample, t_opt the optimizer, t_saved what fusion saves; all in ms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SpeedupFit:
    """The fitted times in ms (`saved_ms` by variant), and the worst relative error of a fitted speedup."""

    grad_ms: float
    opt_ms: float
    saved_ms: dict[str, float]
    worst_error: float

    def baseline_ms(self, batch_size: float) -> float:
        return batch_size * self.grad_ms + self.opt_ms

    def speedup(self, variant: str, batch_size: float) -> float:
        """s(b) of one variant."""
        whole = self.baseline_ms(batch_size)
        return whole / (whole - self.saved_ms[variant])


def fit_speedup(
    batch_sizes: Sequence[int], baseline_ms: Sequence[float], fused_ms: Mapping[str, Sequence[float]]
) -> SpeedupFit:
    """Least squares over the baseline's and all fused variants' step times, which share t_grad and t_opt.

    The step times are linear in the unknowns; each equation is divided by its measured time, so that a relative error
    counts alike at every batch size.

    Raises:
        ValueError: fewer than two batch sizes, from which slope and offset cannot be told apart.
    """
    if len(set(batch_sizes)) < 2:
        raise ValueError(f"the formula needs at least two batch sizes, not {list(batch_sizes)}")
    names = list(fused_ms)
    equations, wanted = [], []
    for column, times in enumerate([baseline_ms, *fused_ms.values()]):
        for size, milliseconds in zip(batch_sizes, times, strict=True):
            saved = [-1.0 if column == index + 1 else 0.0 for index in range(len(names))]
            equations.append(np.array([float(size), 1.0, *saved]) / milliseconds)
            wanted.append(1.0)
    solution, *_ = np.linalg.lstsq(np.array(equations), np.array(wanted), rcond=None)
    grad, opt, *saved_all = (float(value) for value in solution)
    fit = SpeedupFit(grad, opt, dict(zip(names, saved_all, strict=True)), 0.0)
    errors = [
        abs(fit.speedup(name, size) * fused / whole - 1)
        for name in names
        for size, whole, fused in zip(batch_sizes, baseline_ms, fused_ms[name], strict=True)
    ]
    return SpeedupFit(grad, opt, fit.saved_ms, max(errors, default=0.0))
