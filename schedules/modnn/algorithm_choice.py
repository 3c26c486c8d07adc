"""Which algorithm a task runs by (moDNN, section 5.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from retime.schedules.modnn.allocator import Segment
from retime.schedules.modnn.device import Device
from retime.schedules.modnn.offload_scheme import Scheme, find_scheme
from retime.schedules.modnn.prefetch import wanted_now
from retime.schedules.modnn.sized import SizedAlgorithm
from retime.schedules.modnn.techniques import Techniques


@dataclass
class Choice:
    """An algorithm and what has to leave for its workspace.

    Args:
        scheme: what makes room; ``None`` where there is room.
        gain_ms: Eq. 10.
        segment: the workspace, once allocated.
    """

    algorithm: SizedAlgorithm
    scheme: Scheme | None
    gain_ms: float
    segment: Segment | None = None


def choose_algorithm(
    device: Device,
    task: int,
    now_ms: float,
    techniques: Techniques,
    *,
    any_will_do: bool = False,
) -> Choice | None:
    """The algorithm for ``task``, whose inputs and outputs are in place.

    Args:
        now_ms: when its inputs are there.
        techniques: how to choose, and when the prefetches start that a workspace may hold up.
        any_will_do: where the baseline has no room, take another: after a defragmentation there is none to be had.

    Returns:
        ``None`` when there is memory for no algorithm, not even by offloading.
    """
    how, options = techniques.algorithms, device.sized.algorithms[task]
    if how == "baseline" and not any_will_do:
        options = options[:1]
    choices = []
    for option in options:
        choice = _consider(device, task, now_ms, option, techniques)
        if choice:
            choices.append(choice)
    if how == "baseline":
        return choices[0] if choices else None
    if how == "fastest":
        return min(choices, key=lambda choice: (choice.algorithm.ms, choice.algorithm.workspace_bytes), default=None)
    return max(choices, key=lambda choice: (choice.gain_ms, -choice.algorithm.workspace_bytes), default=None)


def _consider(
    device: Device, task: int, now_ms: float, option: SizedAlgorithm, techniques: Techniques
) -> Choice | None:
    base_ms = device.sized.algorithms[task][0].ms
    size = option.workspace_bytes
    if not size:
        return Choice(option, None, base_ms - option.ms)
    segment, scheme = device.pool.find(size), None
    if segment:
        offload_ms = device.vacated_ms(segment.offset, segment.offset + size, now_ms) - now_ms
    else:
        scheme = find_scheme(device, size, now_ms, needed_until=task)
        if scheme is None and not techniques.spare_unused:
            scheme = find_scheme(device, size, now_ms, needed_until=task, unused_too=True)
        if scheme is None:
            return None
        offload_ms = scheme.delay_ms
    delayed_ms = _delayed_prefetch_ms(device, task, now_ms, option, techniques, fits=scheme is None)
    return Choice(option, scheme, base_ms - option.ms - offload_ms - delayed_ms)


def _delayed_prefetch_ms(
    device: Device, task: int, now_ms: float, option: SizedAlgorithm, techniques: Techniques, *, fits: bool
) -> float:
    """T_pre of Eq. 10: the transfers for the nearest task that needs some and for which the workspace takes the room.

    They wait until this task ends, so they cannot be held up for longer than it runs.
    """
    blocks = wanted_now(device, task, now_ms + option.ms, techniques)
    if not blocks:
        return 0.0
    sizes = [device.sized.sizes[block] for block in blocks]
    without = device.pool.would_fit(sizes)
    # A workspace that first needs others to leave finds the memory full: nothing fits beside it.
    beside = device.pool.would_fit([option.workspace_bytes, *sizes])[1:] if fits else [False] * len(sizes)
    held_up = [block for block, before, after in zip(blocks, without, beside, strict=True) if before and not after]
    return min(option.ms, sum(device.copy_ms[block] for block in held_up))
