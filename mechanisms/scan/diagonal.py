"""The elementwise affine scan ``c[t] = a[t] c[t-1] + b[t]`` that rebuilds LSTM's cell states."""

import math

import torch
from torch import Tensor

from retime.mechanisms.scan.local_jacobians import fold, unfold


def diagonal_scan(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """Two levels of about ``sqrt(T)`` steps. Differentiable.

    Args:
        a: ``[T, B, H]``, between 0 and 1, so that no product of it overflows.
        b: ``[T, B, H]``.
        first: ``c[-1]``: ``[B, H]``.

    Returns:
        ``c``: ``[T, B, H]``.
    """
    steps = a.shape[0]
    chunk = max(1, math.isqrt(steps))
    whole = steps // chunk * chunk
    decay: list[Tensor] = []
    within: list[Tensor] = []
    for a_t, b_t in zip(fold(a[:whole], chunk), fold(b[:whole], chunk), strict=True):
        decay.append(a_t * decay[-1] if decay else a_t)
        within.append(torch.addcmul(b_t, a_t, within[-1]) if within else b_t)
    carry, entries = first, []
    for decay_k, within_k in zip(decay[-1], within[-1], strict=True):
        entries.append(carry)
        carry = torch.addcmul(within_k, decay_k, carry)
    cells = unfold(torch.addcmul(torch.stack(within), torch.stack(decay), torch.stack(entries)))
    rest = []
    for a_t, b_t in zip(a[whole:], b[whole:], strict=True):
        carry = torch.addcmul(b_t, a_t, carry)
        rest.append(carry)
    return torch.cat([cells, torch.stack(rest)]) if rest else cells
