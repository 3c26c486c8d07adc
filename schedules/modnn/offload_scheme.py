"""Which blocks leave to make room for a request (moDNN, section 5.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from retime.schedules.modnn.allocator import Segment, offload_runs
from retime.schedules.modnn.device import Device
from retime.schedules.modnn.sized import NEVER


@dataclass(frozen=True)
class Scheme:
    """Neighbouring blocks that leave together.

    Args:
        blocks: by address.
        ready_ms: when the memory is free.
        delay_ms: how much later than asked for.
    """

    blocks: tuple[int, ...]
    ready_ms: float
    delay_ms: float


def find_scheme(
    device: Device, size: int, now_ms: float, *, needed_until: int, unused_too: bool = False
) -> Scheme | None:
    """The offloading scheme of least delay.

    The paper does not say which of several schemes without delay it takes. Here the one whose blocks are used again
    last wins, then the one that copies fewer bytes, then the lower address.

    Args:
        size: bytes wanted in one piece.
        needed_until: blocks used again by this task or an earlier one stay: criterion 2, Figure 5.
        unused_too: drop criterion 1, by which a block stays that no task has used since it was made or fetched. Blocks
            still on their way stay in any case.

    Returns:
        ``None`` when no run of blocks that may leave is large enough.
    """
    unused, next_use, ready_ms = device.unused, device.next_use, device.ready_ms

    def movable(block: int) -> bool:
        if block < 0 or next_use[block] <= needed_until:
            return False
        return block not in unused or (unused_too and ready_ms[block] <= now_ms)

    segments = list(device.pool.segments())
    device.pool.steps += len(segments)
    copy_ms = [_copy_ms(device, segment) for segment in segments]
    copied_ms = list(accumulate(copy_ms, initial=0.0))
    uses = [NEVER if segment.owner is None or segment.owner < 0 else next_use[segment.owner] for segment in segments]
    complete_ms = [
        ready_ms[segment.owner] if ms and segment.owner is not None else 0.0
        for segment, ms in zip(segments, copy_ms, strict=True)
    ]
    idle_ms = device.lane.free_ms

    best: tuple[float, int, float, int] | None = None
    chosen: tuple[int, int, float] | None = None
    for first, stop in offload_runs(segments, size, movable):
        moving_ms = copied_ms[stop] - copied_ms[first] if any(copy_ms[first:stop]) else 0.0
        order = (-min(uses[first:stop]), moving_ms, first)
        if best is not None and best[0] <= 0 and best[1:] <= order:
            continue  # no delay is less than none, so the exact one need not be worked out
        gone_ms = now_ms
        # Behind all other copies and done by now: then no gap has to be searched.
        if moving_ms and max(idle_ms, *complete_ms[first:stop]) + moving_ms > now_ms:
            gone_ms = _gone_ms(device, segments[first:stop], now_ms)
        gone_ms = device.vacated_ms(segments[first].offset, segments[stop - 1].end, gone_ms)
        key = (gone_ms - now_ms, *order)
        if best is None or key < best:
            best, chosen = key, (first, stop, gone_ms)
    if chosen is None:
        return None
    first, stop, gone_ms = chosen
    blocks = tuple(segment.owner for segment in segments[first:stop] if segment.owner is not None)
    return Scheme(blocks, gone_ms, gone_ms - now_ms)


def _copy_ms(device: Device, segment: Segment) -> float:
    block = segment.owner
    return 0.0 if block is None or block < 0 or device.on_host[block] else device.copy_ms[block]


def _gone_ms(device: Device, run: list[Segment], now_ms: float) -> float:
    blocks = [segment.owner for segment in run if segment.owner is not None and _copy_ms(device, segment)]
    requests = [(device.ready_ms[block], device.copy_ms[block]) for block in blocks]
    starts_ms = device.lane.place(requests)
    ends_ms = (start_ms + duration_ms for start_ms, (_, duration_ms) in zip(starts_ms, requests, strict=True))
    return max([now_ms, *ends_ms])
