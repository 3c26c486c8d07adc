"""What deferring costs in memory, and the k that a byte bound allows (Oh et al. 2022, algorithm 2, lines 1 and 2)."""

from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.schedules import largest_k, reverse_first_k, simulate, step_buffers


def sizes_of(deferral: WeightGradientDeferral) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that blocks keep for their weight gradients: inputs by number of the tensor, output gradients by O."""
    inputs: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for number, block in enumerate(deferral.blocks, start=1):
        inputs[number - 1] = sum(deferral.input_bytes.get(layer, 0) for layer in block.layers)
        gradients[number + 1] = sum(deferral.waiting_bytes.get(layer, 0) for layer in block.layers)
    return inputs, gradients


def extra_bytes(deferral: WeightGradientDeferral, k: int) -> int:
    """How much higher than in the conventional order the peak is at this k, simulated from measured sizes."""
    layers = len(deferral.blocks)
    if layers == 0 or k == 0:
        return 0
    return max(0, _peak(deferral, k) - _peak(deferral, 0))


def largest_affordable_k(deferral: WeightGradientDeferral, max_memory: int | None, plain_peak_bytes: int) -> int:
    """The largest k within ``max_memory`` bytes; without a bound the number of blocks.

    Raises:
        ValueError: ``max_memory`` is below ``plain_peak_bytes``, what a step takes with nothing deferred.
    """
    blocks = len(deferral.blocks)
    if max_memory is None or blocks == 0:
        return blocks
    inputs, gradients = sizes_of(deferral)
    return largest_k(
        blocks,
        max_memory,
        activation_bytes=inputs,
        output_gradient_bytes=gradients,
        plain_peak_bytes=plain_peak_bytes,
    )


def _peak(deferral: WeightGradientDeferral, k: int) -> int:
    inputs, gradients = sizes_of(deferral)
    schedule = reverse_first_k(len(deferral.blocks), k)
    buffers = step_buffers(schedule, activation_bytes=inputs, output_gradient_bytes=gradients)
    return simulate(schedule, {"F": 1.0, "O": 1.0, "W": 1.0, "S": 0.0}, buffers=buffers).peak_bytes
