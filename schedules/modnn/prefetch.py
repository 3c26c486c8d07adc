"""When blocks come back to the device, and whether it is of use (moDNN, section 5.2.2)."""

from __future__ import annotations

from retime.schedules.modnn.device import Device
from retime.schedules.modnn.offload_scheme import find_scheme
from retime.schedules.modnn.techniques import Techniques


def prefetch(device: Device, task: int, now_ms: float, end_ms: float, techniques: Techniques) -> None:
    """Lines 15-27 of Algorithm 1: start the copies that have to start before ``task`` does.

    Tasks of which all inputs are on the device are passed over: nothing is to be done for them.

    Args:
        task: about to run, from ``now_ms`` to ``end_ms``.
        techniques: when copies start.
    """
    while (later := device.next_fetch()) is not None and is_due(device, task, end_ms, techniques):
        blocks = _missing(device, later)
        if not is_useful(device, task, later, blocks, spare_unused=techniques.spare_unused):
            return
        for block in blocks:
            room_ms = device.allocate(block, now_ms)
            if room_ms is None:
                # What a task before `later` uses must not leave for it, hence its number here.
                scheme = find_scheme(device, device.sized.sizes[block], now_ms, needed_until=later)
                if scheme is None:
                    return
                for leaving in scheme.blocks:
                    device.offload(leaving, now_ms)
                room_ms = device.allocate(block, now_ms)
                assert room_ms is not None
            device.fetch(block, room_ms)


def is_due(device: Device, task: int, end_ms: float, techniques: Techniques) -> bool:
    """Eq. 9: would a later task be delayed if copies started only after ``task``, at ``end_ms``?

    EST(s), the expected start of a task, is the fastest time of all tasks before it plus every delay so far, the choice
    of a slower algorithm for ``task`` included: that is ``end_ms`` plus the fastest time of the tasks between. Beyond
    the paper, what the stream has still to copy by then counts, and so do the copies for the tasks between, see
    :class:`Techniques`.
    """
    queue_ms = max(0.0, device.lane.free_ms - end_ms)
    deadline_ms = device.fetch_deadline_ms(nearest_only=not techniques.prefetch_backlog)
    return queue_ms + device.sized.before_ms[task + 1] > deadline_ms


def is_useful(device: Device, task: int, later: int, blocks: list[int], *, spare_unused: bool) -> bool:
    """Whether no defragmentation is expected from ``task`` to ``later``, which would undo the prefetch (line 16).

    The paper's prediction: of what is on the device, only blocks that may not leave count as occupying memory, that is
    those not used since they came (criterion 1); and all prefetches on the way are made, this one included. A
    defragmentation is expected where these and the task's own inputs, outputs and workspace exceed the memory.
    """
    sized = device.sized
    leaving: dict[int, int] = {}  # by task that uses them: bytes that may leave from then on
    pinned = 0

    def pin(block: int, use: int) -> int:
        leaving[use] = leaving.get(use, 0) + sized.sizes[block]
        return sized.sizes[block]

    for block, fetched in device.unused.items():
        # Inputs of the task that is about to run are used by it.
        if (fetched or spare_unused) and device.next_use[block] > task:
            pinned += pin(block, device.next_use[block])
    for block in blocks:
        pinned += pin(block, later)
    for between in range(task, later + 1):
        pinned -= leaving.pop(between, 0)
        if between > task and pinned + sized.least_bytes[between] > device.pool.capacity:
            return False
        for block in sized.makes[between] if spare_unused else ():
            pinned += pin(block, sized.next_use[between][block])
    return True


def wanted_now(device: Device, task: int, end_ms: float, techniques: Techniques) -> list[int]:
    """The blocks of the nearest later task that lacks some, if their prefetch is due before ``task`` runs."""
    later = device.next_fetch()
    if later is None or not is_due(device, task, end_ms, techniques):
        return []
    return _missing(device, later)


def _missing(device: Device, task: int) -> list[int]:
    return [block for block in device.sized.needs[task] if device.is_away(block)]
