"""vDNN on the same simulator: what Algorithm 1 is compared with (Rhu et al. 2016; moDNN, sections 4.4 and 5.2.1)."""

from __future__ import annotations

from retime.schedules.budget import BudgetError, GraphTask, Phase, TaskGraph
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.bounds import NEVER, SizedAlgorithm, SizedGraph, size_graph
from retime.schedules.modnn.device import WORKSPACE, Device, OffloadSchedule, RunLog

_UNBOUNDED = 1 << 62


def is_convolution(task: GraphTask) -> bool:
    """Return whether a task is taken for a convolution: it has a choice of algorithms, or is called one."""
    return len(task.algorithms) > 1 or "conv" in task.name.lower()


def vdnn_schedule(
    graph: TaskGraph,
    samples: int,
    budget_bytes: int,
    bandwidth_bytes_per_ms: float,
    *,
    layers: str = "all",
    algorithms: str = "fastest",
    update: bool = True,
) -> OffloadSchedule:
    """Simulate one round of vDNN.

    What a forward task reads and a backward task needs again is copied out while the last forward task that reads it
    runs; what no forward task reads, while the task after its producer runs. Towards its use it is copied in while one
    earlier task runs: the first from which no convolution lies between. A copy overlaps with exactly one task, and the
    next task waits for both (Figure 4).

    Args:
        graph: the step.
        samples: the whole batch; vDNN has no sub-batches.
        budget_bytes: for everything, what stays on the device included.
        bandwidth_bytes_per_ms: of the transfers, either way.
        layers: ``"all"`` offloads what any task reads, ``"conv"`` only what convolutions read.
        algorithms: ``"fastest"`` takes the fastest for which there is memory, ``"baseline"`` always the first.
        update: ``False`` leaves out the weight updates.

    Raises:
        BudgetError: it does not fit; vDNN has no way to make room.
        ScheduleError: an unknown name, or a bandwidth that is not above 0.
    """
    if layers not in ("all", "conv"):
        raise ScheduleError(f"layers={layers!r} must be 'all' or 'conv'")
    if algorithms not in ("fastest", "baseline"):
        raise ScheduleError(f"algorithms={algorithms!r} must be 'fastest' or 'baseline'")
    if not bandwidth_bytes_per_ms > 0:
        raise ScheduleError(f"bandwidth_bytes_per_ms={bandwidth_bytes_per_ms} must be above 0")
    sized = size_graph(graph, samples, update=update)
    convolutions = [is_convolution(task) for task in sized.tasks]
    offload_at = _offload_points(sized, convolutions, layers)

    def run(capacity: int, how: str) -> OffloadSchedule:
        return _Round(sized, convolutions, offload_at, budget_bytes, bandwidth_bytes_per_ms, capacity, how).run()

    try:
        return run(budget_bytes - sized.resident_bytes if budget_bytes > sized.resident_bytes else 0, algorithms)
    except _NoRoomError as error:
        task = sized.tasks[error.task]
        raise BudgetError(
            f"a budget of {budget_bytes} bytes is too small for vDNN ({layers}) with {samples} samples at a time: "
            f"task {task.name!r} found no {error.bytes} bytes in one piece",
            floor_bytes=run(_UNBOUNDED, "baseline").peak_bytes,
            task=task.name,
            layer=task.layer,
            hint="Use sub-batches (vDNN+), or Algorithm 1, which makes room",
        ) from None


class _NoRoomError(Exception):
    def __init__(self, task: int, size: int) -> None:
        self.task, self.bytes = task, size


def _offload_points(sized: SizedGraph, convolutions: list[bool], layers: str) -> dict[int, list[int]]:
    """Return the blocks copied out while a task runs, by task."""
    made_at: dict[int, int] = {}
    read_at: dict[int, int] = {}
    later: dict[int, int] = {}
    counts: dict[int, bool] = {}
    for index, task in enumerate(sized.tasks):
        forward = task.phase is Phase.FORWARD
        for block in sized.makes[index] if forward else ():
            made_at[block] = index
        for block in sized.needs[index]:
            if forward:
                read_at[block] = index
                counts[block] = counts.get(block, False) or convolutions[index]
            else:
                later.setdefault(block, index)
    points: dict[int, list[int]] = {}
    for block in {**made_at, **read_at}:
        point = read_at.get(block, made_at.get(block, 0) + 1)
        wanted = layers == "all" or counts.get(block, False)
        # What the very next task needs would come straight back: vDNN leaves the last layer's output in place.
        if wanted and later.get(block, NEVER) not in (NEVER, point, point + 1):
            points.setdefault(point, []).append(block)
    return points


class _Round:
    def __init__(
        self,
        sized: SizedGraph,
        convolutions: list[bool],
        offload_at: dict[int, list[int]],
        budget_bytes: int,
        bandwidth: float,
        capacity: int,
        how: str,
    ) -> None:
        self.sized = sized
        self.convolutions = convolutions
        self.offload_at = offload_at
        self.how = how
        self.device = Device(sized, capacity, bandwidth)
        self.log = RunLog(sized, budget_bytes)

    def run(self) -> OffloadSchedule:
        device, sized = self.device, self.sized
        now_ms = ended_ms = 0.0
        for task in range(len(sized.tasks)):
            missing = [block for block in sized.needs[task] if device.segment[block] is None]
            for block in (*missing, *sized.makes[task]):
                if device.allocate(block, now_ms) is None:
                    raise _NoRoomError(task, sized.sizes[block])
                device.next_use[block] = task
            for block in missing:
                device.fetch(block, now_ms)
                now_ms = max(now_ms, device.ready_ms[block])
            option = self._algorithm(task)
            segment = device.pool.allocate(option.workspace_bytes, WORKSPACE) if option.workspace_bytes else None
            self.log.stalled(task, now_ms - ended_ms)

            start_ms, end_ms = now_ms, now_ms + option.ms
            leaving = [block for block in self.offload_at.get(task, ()) if device.segment[block]]
            copied_ms = [device.copy_out(block, start_ms) for block in leaving]
            device.write(task, start_ms, end_ms)
            copied_ms += self._prefetch(task, start_ms)
            device.finish(task, start_ms, end_ms, segment)
            self.log.ran(task, start_ms, end_ms, option)
            now_ms = max([end_ms, *copied_ms])  # the next task waits for both
            ended_ms = end_ms
            for block in leaving:
                if device.segment[block]:
                    device.offload(block, now_ms)
        return self.log.result(device, now_ms)

    def _algorithm(self, task: int) -> SizedAlgorithm:
        options = self.sized.algorithms[task]
        if self.how == "baseline":
            options = options[:1]
        for option in sorted(options, key=lambda option: (option.ms, option.workspace_bytes)):
            if not option.workspace_bytes or self.device.pool.find(option.workspace_bytes):
                return option
        raise _NoRoomError(task, min(option.workspace_bytes for option in options))

    def _prefetch(self, task: int, start_ms: float) -> list[float]:
        """Copy in, while ``task`` runs, what the nearest task lacks, looking no further than the next convolution."""
        device, tasks = self.device, self.sized.tasks
        for later in range(task + 1, len(tasks)):
            # The forward pass brings in inputs for itself; only its last task looks into the backward pass.
            if tasks[task].phase is Phase.FORWARD is not tasks[later].phase and later > task + 1:
                return []
            blocks = [block for block in self.sized.needs[later] if device.is_away(block)]
            if blocks:
                ends_ms = []
                for block in blocks:
                    room_ms = device.allocate(block, start_ms)
                    if room_ms is not None:  # else the task will fetch it itself, and wait
                        device.fetch(block, room_ms)
                        ends_ms.append(device.ready_ms[block])
                return ends_ms
            if self.convolutions[later]:
                return []
        return []
