"""The RNN of Figure 11 (a) of out-of-order backprop on paper: cells with a part that does not depend on the state.

Legend, a cell i: I is its part that does not depend on the state, F the one that does, O the gradient of the state, W
and V the weight gradients of F and I. F needs its own I and the F before; O, W and V need the O behind (section 8.4.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Result
from retime.recipes.ooo import pipeline_scaling
from retime.recipes.ooo.pipeline_scaling import GPIPE, MODEL_PARALLEL, ONE, PAPERS1, PAPERS2, PipelineScaling
from retime.recipes.ooo.settings import PaperPipelineSettings
from retime.schedules.pipeline import block, modulo

STATE_FIRST = "cross-layer model parallel, state first"
GPIPE_STATE_FIRST = "GPipe, state first"
"""The same two with GPUs that run what does not depend on the state only where nothing else is ready."""


class Job(NamedTuple):
    """A task of a cell for a micro-batch; B is O and W as one, as frameworks run them."""

    kind: str
    cell: int
    micro_batch: int = 0


_URGENCIES: dict[str, Callable[[Job], int]] = {
    MODEL_PARALLEL: lambda job: 0,
    GPIPE: lambda job: 0,
    STATE_FIRST: lambda job: job.kind in "IV",
    GPIPE_STATE_FIRST: lambda job: job.kind in "IV",
    PAPERS1: lambda job: "FOIWV".index(job.kind),
    PAPERS2: lambda job: "FOIWV".index(job.kind),
}
"""By schedule, which of the tasks that are ready a GPU runs first: the least, and of equals the one that came first."""


@dataclass(frozen=True)
class Cells:
    """A recurrent network on a cluster."""

    cells: int
    ranks: int  # GPUs
    micro_batches: int  # of GPipe; the others have the batch whole
    independent: float  # time of I over that of F; of V over that of W
    ratio: float  # of a message to F of the whole batch
    fixed: float = 0.0  # share of a task's time that is the same however few samples it has

    def units(self, name: str) -> float:
        """A step's length; one GPU runs one task after another.

        Raises:
            ValueError: there is no schedule of that name.
        """
        if name not in (ONE, *_URGENCIES):
            raise ValueError(f"schedules: {name!r} is unknown here; there are {', '.join(map(repr, _URGENCIES))}")
        batches = self.micro_batches if name in (GPIPE, GPIPE_STATE_FIRST) else 1
        jobs = self.jobs(batches, split=name in (PAPERS1, PAPERS2))
        share = self.fixed + (1 - self.fixed) / batches
        units = {}
        for job in jobs:  # nobody needs the gradient of the first state
            whole = self.independent if job.kind in "IV" else 2.0 if job.kind == "B" and job.cell > 1 else 1.0
            units[job] = whole * share
        if name == ONE:
            return sum(units.values())
        rank_of = (modulo if name == PAPERS2 else block)(self.cells, self.ranks).rank_of
        ranks = {job: rank_of[job.cell - 1] for job in jobs}
        return makespan(jobs, units, ranks, self.ratio * share, _URGENCIES[name])

    def jobs(self, batches: int, *, split: bool) -> dict[Job, list[Job]]:
        """Each task with those that it needs, in the order in which a framework comes upon them."""
        needs: dict[Job, list[Job]] = {}
        for batch in range(batches):
            for cell in range(1, self.cells + 1):
                needs[Job("I", cell, batch)] = []
                before = [Job("F", cell - 1, batch)] if cell > 1 else []
                needs[Job("F", cell, batch)] = [Job("I", cell, batch), *before]
        for batch in range(batches):
            for cell in range(self.cells, 0, -1):
                behind = [Job("O" if split else "B", cell + 1, batch)]
                if cell == self.cells:  # all forward passes come first
                    behind = [Job("F", cell, batch), Job("F", cell, batches - 1)]
                kinds = ("O", "W", "V") if split and cell > 1 else ("W", "V") if split else ("B", "V")
                for kind in kinds:
                    needs[Job(kind, cell, batch)] = list(dict.fromkeys(behind))
        return needs


class RecurrentPipeline(PipelineScaling):
    """A point a case: an RNN by each schedule."""

    axes = ()

    def measure(self, settings: PaperPipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = pipeline_scaling.case_of(settings, at["case"], Cells)
        always = (ONE, MODEL_PARALLEL, STATE_FIRST, GPIPE_STATE_FIRST)
        took = {name: case.units(name) for name in dict.fromkeys((*always, *settings.schedules))}
        rows = pipeline_scaling.rows_of(took)
        return Measured(rows, {"cells": case.cells, "GPUs": case.ranks, "GPipe's micro-batches": case.micro_batches})

    def notes(self, result: Result) -> list[str]:
        return [
            "Units: F, O and W of a cell take one each for the whole batch, its part that does not depend on the state "
            "as long, and so its weight gradient: the paper does not say how long. Cross-layer model parallelism and "
            "GPipe run what is ready in the order in which it became ready, O and W as one; with the state first they "
            "run I and V only where nothing else is ready. OOO-Pipe runs F and O first. Only GPipe has micro-batches, "
            "as in the paper.",
            "A task of a micro-batch takes its share of the samples' time and, where a part of it is fixed, all of "
            "that: small kernels do not fill a GPU, which is the second of the two reasons that the paper gives.",
        ]


def makespan(
    jobs: dict[Job, list[Job]],
    units: dict[Job, float],
    rank_of: dict[Job, int],
    message: float,
    urgency: Callable[[Job], int],
) -> float:
    """End of the last task, if each free rank begins the most urgent task that is ready.

    Args:
        jobs: each task with those that it needs.
        units: what each takes.
        rank_of: where each runs.
        message: units between a task's end and what needs it on another rank.
        urgency: the least comes first; of equals the one that was ready first.
    """
    readers: defaultdict[Job, list[Job]] = defaultdict(list)
    for job, needs in jobs.items():
        for need in needs:
            readers[need].append(job)
    number = {job: place for place, job in enumerate(jobs)}
    ends: dict[Job, float] = {}
    free = dict.fromkeys(rank_of.values(), 0.0)  # since when
    ready = {job: 0.0 for job, needs in jobs.items() if not needs}  # since when

    def turn(job: Job) -> tuple[float, int, float, int]:
        return max(ready[job], free[rank_of[job]]), urgency(job), ready[job], number[job]

    while ready:
        job = min(ready, key=turn)  # of all ranks; what it makes ready begins later
        ends[job] = free[rank_of[job]] = turn(job)[0] + units[job]
        del ready[job]
        for reader in readers[job]:
            if all(need in ends for need in jobs[reader]):
                hops = {need: message if rank_of[need] != rank_of[reader] else 0.0 for need in jobs[reader]}
                ready[reader] = max(ends[need] + hop for need, hop in hops.items())
    return max(ends.values())
