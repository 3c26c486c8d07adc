"""What the floor's plan needs beside its tensors, measured on samples that no budget has a part in choosing."""

from __future__ import annotations

from retime.foundations.cpu_pool import within
from retime.foundations.parts import batch_statistics_layers
from retime.mechanisms.memory_budget.dry_run import StepProfile, TrainingStep
from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.scratch import measured, operations_between, rest_between, spare_bytes

__all__ = ["least_costs"]

_HEAP_BYTES, _SHARE = 2**19, 16
_VARIES_BYTES = 2**18
"""What a process grows by beside tensors differs by as much from run to run."""


def least_costs(step: TrainingStep, host: HostTier, sub_batch: int, plain: StepProfile | None = None) -> StepCosts:
    """Costs of a step with the fewest samples at once, of memory alone: the same each time they are asked for.

    What operations allocate for themselves is counted by the pool, or by a device's allocator, and does not change.
    What a process grows by beyond that does, by some pages: on a CPU an allowance stands for it, of up to 1.5 MiB,
    that is doubled until it is, but for 256 KiB, as much as was measured.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        host: where storages go.
        sub_batch: the fewest samples; where that is the batch, a quarter and an eighth of it are measured.
        plain: see :func:`~retime.mechanisms.memory_budget.planning.scratch.measured`.

    Returns:
        ``scratch_bytes`` to add to the least plan, and ``spare_bytes`` to add to the plain step.
    """
    sizes = (sub_batch,) if sub_batch < step.samples else _parts(step)
    with within(step.given(), 0) as pool:
        _, found = measured(step, sizes, host, plain, pool, 0)
    low, high = found[0], found[-1]
    operations = operations_between(low, high, sizes[0], sizes[-1])
    rest = rest_between(low, high, sizes[0], sizes[-1]).at(sub_batch)
    if next(step.module.parameters()).device.type != "cpu":
        return StepCosts(operations=operations, scratch_bytes=rest, spare_bytes=rest)
    spare = spare_bytes(plain)
    scratch = allowance = spare + (_HEAP_BYTES if plain is None else min(_HEAP_BYTES, plain.peak_bytes // _SHARE))
    while scratch < rest - _VARIES_BYTES:
        scratch *= 2
    return StepCosts(operations=operations, scratch_bytes=scratch, spare_bytes=spare + scratch - allowance)


def _parts(step: TrainingStep) -> tuple[int, ...]:
    """An eighth and a quarter of the batch, or what is nearest."""
    least = min(step.samples, 2 if batch_statistics_layers(step.module) else 1)
    high = min(step.samples, max(2 * least, step.samples // 4))
    low = max(least, min(high // 2, high - 1))
    return (low, high) if low < high else (high,)
