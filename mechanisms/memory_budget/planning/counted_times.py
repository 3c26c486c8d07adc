"""Times of a step by what it computes on: the same in every run, where clocks are not to choose."""

from __future__ import annotations

import torch

from retime.mechanisms.memory_budget.dry_run import StepProfile
from retime.schedules.budget import BlockKind, Phase

__all__ = ["counted_copies", "counted_ms"]

_OPERATION_MS = 0.005
"""Of an operation that computes on nothing."""
_BYTES_PER_MS = 1e7
"""That operations read and write."""
_DISK, _BUS = 1e6, 1e7
"""Bytes a millisecond from a CPU to its disk, and from a device to the host's memory."""


def counted_ms(plain: StepProfile | None) -> tuple[float, float]:
    """The fixed part of a sub-batch's time, and the part of each sample, from a dry run of the whole batch.

    What parameters have in it is read by every sub-batch, all else by the samples.
    """
    if plain is None:
        return 1.0, 1.0
    fixed = shared = 0
    trace, count = plain.trace, 0
    for operation in trace.operations:
        if operation.phase is Phase.UPDATE:
            continue
        count += 1
        for index in {*operation.reads, *operation.writes}:
            storage = trace.storages[index]
            if storage.kind in (BlockKind.WEIGHT, BlockKind.WEIGHT_GRADIENT):
                fixed += storage.nbytes
            else:
                shared += storage.nbytes
    return count * _OPERATION_MS + fixed / _BYTES_PER_MS, shared / _BYTES_PER_MS / plain.samples


def counted_copies(device: torch.device) -> float:
    """Bytes a millisecond to the host and back."""
    return _DISK if device.type == "cpu" else _BUS
