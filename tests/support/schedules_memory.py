"""An independent judge of simulated schedules, and small random task graphs."""

import random
from collections import defaultdict
from itertools import pairwise

from retime.schedules.budget import STAYS, Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.modnn.device import Direction

SLACK_MS = 1e-9


def copies(schedule):
    """What is copied when: direction, block, start and end."""
    return [(str(copy.direction), copy.block, copy.start_ms, copy.end_ms) for copy in schedule.copies]


def judge(graph, schedule, *, update=True):
    """Fail unless the schedule could run: memory, values, both streams and the totals; returns the peak found."""
    tasks = [task for task in graph.tasks if update or task.phase is not Phase.UPDATE]
    ends = _compute_stream(tasks, schedule)
    _transfer_stream(schedule)
    by_name = defaultdict(list)
    for placement in schedule.placements:
        by_name[placement.name].append(placement)
    writes = defaultdict(list)
    for task in tasks:
        for name in task.writes:
            writes[name].append(ends[task.name])
    _values(graph, tasks, schedule, ends, by_name, writes)
    return _memory(graph, schedule)


def _compute_stream(tasks, schedule):
    spans = [span for span in schedule.spans if span.lane == "compute"]
    assert [span.name for span in spans] == [task.name for task in tasks]
    for span, following in pairwise(spans):
        assert span.end_ms <= following.start_ms + SLACK_MS
    waiting = sum(stall.ms for stall in schedule.stalls)
    assert abs(sum(span.duration_ms for span in spans) - schedule.compute_ms) < 1e-6
    assert schedule.stall_ms >= waiting - 1e-6
    for span, task in zip(spans, tasks, strict=True):
        name = schedule.algorithms.get(span.name, task.algorithms[0].name)
        option = next(option for option in task.algorithms if option.name == name)
        assert abs(span.duration_ms - option.ms(schedule.samples)) < 1e-6
        size = option.workspace_bytes(schedule.samples)
        workspaces = [p for p in schedule.placements if p.name == f"workspace of {task.name}"]
        assert [p.bytes for p in workspaces] == ([size] if size else [])
        assert all(p.start_ms <= span.start_ms + SLACK_MS and p.end_ms >= span.end_ms - SLACK_MS for p in workspaces)
    return {span.name: (span.start_ms, span.end_ms) for span in spans}


def _transfer_stream(schedule):
    copies = sorted(schedule.copies, key=lambda copy: (copy.start_ms, copy.end_ms))
    for copy, following in pairwise(copies):
        assert copy.end_ms <= following.start_ms + SLACK_MS, f"{copy} overlaps {following}"


def _values(graph, tasks, schedule, ends, by_name, writes):
    """Each task finds the right values of all it reads on the device, from its start to its end."""
    arrivals = defaultdict(list)
    for copy in schedule.copies:
        block = graph.blocks[copy.block]
        assert copy.bytes == block.size_bytes(schedule.samples)
        if copy.direction is Direction.OFFLOAD:
            assert block.kind is not BlockKind.INPUT, "an input is on the host already"
            assert _held(by_name[copy.block], copy.start_ms, copy.end_ms), f"{copy} of memory that it does not hold"
            continue
        assert _held(by_name[copy.block], copy.start_ms, copy.end_ms), f"{copy} into memory that it does not hold"
        arrivals[copy.block].append(copy)
        newest = max((end for _, end in writes[copy.block] if end <= copy.start_ms + SLACK_MS), default=0.0)
        if block.kind is BlockKind.INPUT and not writes[copy.block]:
            continue
        saved = [c for c in schedule.copies if c.block == copy.block and c.direction is Direction.OFFLOAD]
        assert any(c.start_ms >= newest - SLACK_MS and c.end_ms <= copy.start_ms + SLACK_MS for c in saved), (
            f"{copy} brings back a value that was never saved"
        )
    for task in tasks:
        start_ms, end_ms = ends[task.name]
        for name in (*task.reads, *task.writes):
            block = graph.blocks[name]
            if block.kind in STAYS or not block.size_bytes(schedule.samples):
                continue
            holding = _held(by_name[name], start_ms, end_ms)
            assert holding, f"{task.name} finds no memory for {name}"
            if name in task.reads:
                came = [copy.end_ms for copy in arrivals[name] if holding.start_ms - SLACK_MS <= copy.start_ms < end_ms]
                came += [end for start, end in writes[name] if holding.start_ms - SLACK_MS <= start < start_ms]
                assert came, f"{task.name} reads {name}, which never came"
                assert min(came) <= start_ms + SLACK_MS, f"{task.name} starts before {name} has come"


def _held(placements, start_ms, end_ms):
    return next((p for p in placements if p.start_ms <= start_ms + SLACK_MS and p.end_ms >= end_ms - SLACK_MS), None)


def _memory(graph, schedule):
    """No address holds two things at once, and nothing lies above the budget."""
    placements = schedule.placements
    for index, one in enumerate(placements):
        for other in placements[index + 1 :]:
            if other.start_ms >= one.end_ms - SLACK_MS:
                break  # by start: all later ones start later still
            apart = one.offset + one.bytes <= other.offset or other.offset + other.bytes <= one.offset
            brief = min(one.end_ms, other.end_ms) - max(one.start_ms, other.start_ms) <= SLACK_MS
            assert apart or brief, f"{one} and {other} lie on each other"
    highest = max((p.offset + p.bytes for p in placements), default=0)
    peak = graph.resident_bytes(schedule.samples) + highest
    assert peak <= schedule.peak_bytes <= schedule.budget_bytes
    assert schedule.live_peak_bytes <= schedule.peak_bytes
    return peak


def random_graph(seed):
    """Forward and backward of a few layers, with skips, masks, a gradient added to, and a choice of algorithms."""
    rng = random.Random(seed)
    layers = rng.randint(2, 7)
    blocks = {"x": Block("x", BlockKind.INPUT, 0, rng.randint(1, 6))}
    blocks["weights"] = Block("weights", BlockKind.WEIGHT, rng.randint(0, 10))
    blocks["empty"] = Block("empty", BlockKind.ACTIVATION)
    outputs, tasks, saved = ["x"], [], []

    def options():
        base = Algorithm("base", rng.choice([0, 0.5]), rng.randint(1, 8) / 4, rng.choice([0, 0, 1]))
        fast = Algorithm("fast", 0, base.sample_ms / 2, rng.randint(1, 6), rng.randint(0, 2))
        return (base, fast) if rng.random() < 0.5 else (base,)

    for layer in range(1, layers + 1):
        name = f"y{layer}"
        blocks[name] = Block(name, BlockKind.ACTIVATION, rng.choice([0, 0, 2]), rng.randint(1, 9))
        reads = {outputs[-1], rng.choice(outputs), "weights"}
        writes = [name, "empty"] if layer == 1 else [name]
        if rng.random() < 0.4:
            mask = f"mask{layer}"
            blocks[mask] = Block(mask, BlockKind.ACTIVATION, 0, rng.randint(1, 4) / 2)
            writes.append(mask)
        tasks.append(GraphTask(f"F{layer}", Phase.FORWARD, f"l{layer}", tuple(sorted(reads)), tuple(writes), options()))
        saved.append((sorted(reads - {"weights"}), writes[1:] if layer > 1 else writes[2:]))
        outputs.append(name)
    blocks["dx"] = Block("dx", BlockKind.GRADIENT, 0, 1)
    for layer in range(layers, 0, -1):
        gradient = f"d{layer - 1}"
        blocks[gradient] = Block(gradient, BlockKind.GRADIENT, 0, rng.randint(1, 9))
        reads, masks = saved[layer - 1]
        above = [f"d{layer}"] if layer < layers else []
        first = layer == layers
        tasks.append(
            GraphTask(
                f"B{layer}",
                Phase.BACKWARD,
                f"l{layer}",
                (*reads, *masks, *above, *([] if first else ["dx"])),
                (gradient, "dx"),
                options(),
            )
        )
    tasks.append(GraphTask("U", Phase.UPDATE, "all", ("weights", "dx"), ("weights",), (Algorithm("add", 0.25),)))
    return TaskGraph(blocks, tuple(tasks))
