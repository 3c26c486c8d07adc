"""Which layers make a stage, which rank has it, and in which order ranks run their stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

from retime.foundations.messages import show_bytes
from retime.foundations.torch_private.distributed import PipelineAction, torch_pipeline_orders
from retime.mechanisms.pipeline.checks import PipelineError
from retime.schedules import Schedule
from retime.schedules.pipeline import (
    FLUSH,
    Hops,
    PipelineTimeline,
    Placement,
    StageCosts,
    block,
    even_stages,
    fastest_list_schedule,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    joined_gradients,
    least_cap,
    list_schedule,
    modulo,
    one_forward_one_backward,
    orders_of,
    simulate_pipeline,
    v_shape,
    zb_h1,
    zbv,
)

SCHEDULES = {
    "ooo2": "gradient fast-forwarding with modulo allocation",
    "ooo2_flush": "the same in the paper's form, all forward passes first",
    "ooo1": "gradient fast-forwarding on consecutive layers",
    "ooo1_flush": "the same in the paper's form",
    "ooo_v": "gradient fast-forwarding down the ranks and up again, as ZBV places layers",
    "ooo": "of ooo1, ooo2 and ooo_v the one with the shortest step on paper",
    "gpipe": "GPipe",
    "1f1b": "one forward, one backward",
    "zb_h1": "ZB-H1",
    "zbv": "ZBV",
    "interleaved": "interleaved 1F1B",
    "interleaved_zero_bubble": "interleaved zero bubble",
}
_ONE_CHUNK = {"ooo1", "ooo1_flush", "gpipe", "1f1b", "zb_h1"}
_TORCHS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_SAME_AS_TORCHS = {"GPipe": "gpipe", "1F1B": "1f1b"}
_TWO_CHUNKS = {"ooo_v", "zbv", "ZBVZeroBubble", "DualPipeV"}
_TWO_OR_MORE = {*_TWO_CHUNKS, "InterleavedZeroBubble"}
_PUBLISHED = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb_h1": zb_h1,
    "zbv": zbv,
    "interleaved": interleaved,
    "interleaved_zero_bubble": interleaved_zero_bubble,
}
_SEARCHED = ("ooo1", "ooo2", "ooo_v")
_ANY = "ooo"
_FLUSH_FORMS = ("ooo1_flush", "ooo2_flush")
_CAPPED = (_ANY, *_SEARCHED, *_FLUSH_FORMS)
_AS_GOOD = 1.01
"""Among plans so close to the shortest the one with the fewest stages is taken: each task costs time of its own."""
_AS_EVEN = 1.05
"""Even cuts are those whose largest share is so close to the least; the shortest step decides among them."""
_FULL_LAYER = 1000
"""So often the mean layer's bytes count what a layer counts that has none."""
_NOMINAL_TASK = 0.05
"""Share of a layer's F that a task takes beside its layers, where nothing may be measured."""
_AS_SHORT = 1.005
"""Among orders so close to the shortest, in measured times, that with the fewest split backward passes is taken."""
_FAST_FORWARDING = {"ooo1": zb_h1, "ooo2": interleaved_zero_bubble, "ooo_v": zbv}
"""Orders of others that let weight gradients wait, by allocation."""


@dataclass(frozen=True)
class Costs:
    """Costs of the layers, for one micro-batch.

    Attributes:
        saved_bytes: what a layer keeps for its backward pass.
        hop_ms: of a message between two ranks, or by ranks; see :data:`~retime.schedules.pipeline.Hops`.
        task_ms: what a task takes beside its layers, in the runtime.
        output_gradient_ms, weight_gradient_ms: measured; as long as forward passes when left out.
        message_ms: of the processor of either rank, which computes nothing meanwhile, for a message between them.
        parameter_bytes: of a layer, with what lies in front of the layers and behind them in the outermost.
    """

    forward_ms: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    hop_ms: Hops
    task_ms: float = 0.0
    output_gradient_ms: tuple[float, ...] = ()
    weight_gradient_ms: tuple[float, ...] = ()
    message_ms: float = 0.0
    parameter_bytes: tuple[int, ...] = ()

    @property
    def by_kind(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the times of F, O and W, by layer."""
        return self.forward_ms, self.output_gradient_ms or self.forward_ms, self.weight_gradient_ms or self.forward_ms

    @property
    def total_ms(self) -> tuple[float, ...]:
        """Return the time of F, O and W together, by layer."""
        return tuple(map(sum, zip(*self.by_kind, strict=True)))

    @property
    def nominal(self) -> Costs:
        """The same layers as if each took as long as any other: what is chosen by these is chosen in every run."""
        layers = len(self.forward_ms)
        return Costs((1.0,) * layers, self.saved_bytes, 0.0, _NOMINAL_TASK, parameter_bytes=self.parameter_bytes)


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline.

    Attributes:
        stage_of: the stage of each layer, from 0.
        rank_of: the rank of each stage.
        orders: by rank, what it computes.
        makespan_ms: simulated from measured times; None for schedules of torch's.
        bubble_share: by rank, of that.
    """

    name: str
    stage_of: tuple[int, ...]
    rank_of: tuple[int, ...]
    orders: dict[int, list[PipelineAction]]
    micro_batches: int
    makespan_ms: float | None = None
    bubble_share: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @cached_property
    def waiting(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose weight gradients run apart; others have both gradients in one pass."""
        return frozenset(
            (stage, batch) for order in self.orders.values() for kind, stage, batch in order if kind == "W"
        )

    def layers_of(self, stage: int) -> list[int]:
        """The layers of a stage, in order."""
        return [layer for layer, one in enumerate(self.stage_of) if one == stage]


def check_schedule(name: str) -> str:
    """Return the schedule's own name.

    Raises:
        ValueError: there is none of that name.
    """
    name = name.removeprefix("Schedule")  # torch's classes are called so
    name = _SAME_AS_TORCHS.get(name, name)
    if name not in SCHEDULES and name not in _TORCHS:
        raise ValueError(
            f"schedule={name!r} is unknown: choose from {', '.join(SCHEDULES)}, or of torch's own "
            f"{', '.join((*_SAME_AS_TORCHS, *_TORCHS))}"
        )
    return name


class _CapTooLowError(PipelineError):
    """No order keeps the cap; ``least`` bytes can be kept."""

    def __init__(self, schedule: str, cap: int, least: int, rank: int, alive: int) -> None:
        self.least = least
        what = "one micro-batch" if alive == 1 else f"the {alive} micro-batches that are alive at once"
        super().__init__(
            f"activation_cap={show_bytes(cap)} is too low for schedule={schedule!r}: activations of {what} take "
            f"{show_bytes(least)} on rank {rank}. Give activation_cap={least} or more, or smaller micro-batches"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


class Planner:
    """Plans a pipeline for any number of micro-batches; the stages stay those of the first plan.

    Args:
        schedule: one of :data:`SCHEDULES`, or a schedule of torch's.
        group: layers a stage under modulo allocation; ``"auto"``: those that give the shortest simulated step.
        cap: bytes of activations that a rank may keep, for the schedules whose names begin with ``ooo``.
        split: ``"fastest"``: stages of equal time, as many as give the shortest simulated step; ``"even"``: ranks with
            equal bytes of parameters, by nothing that is measured; or the numbers of the first layers of the stages.
    """

    def __init__(
        self,
        schedule: str,
        ranks: int,
        costs: Costs,
        *,
        group: int | Literal["auto"] = "auto",
        cap: int | None = None,
        split: Literal["even", "fastest"] | tuple[int, ...] = "fastest",
    ) -> None:
        self._schedule, self._ranks, self._costs, self._cap = check_schedule(schedule), ranks, costs, cap
        self._group, self._split = group, split
        self._cut: dict[tuple[str, int], tuple[int, ...]] = {}  # the stage of each layer, by name and stages
        self._chosen: tuple[str, int] | None = None  # schedule and stages of the first plan
        self._measured: StageCosts | None = None
        self._rank_of: tuple[int, ...] | None = None
        self._found: dict[tuple[str, int, int], Schedule] = {}  # by name, stages and micro-batches
        layers = len(costs.forward_ms)
        if schedule in _TWO_OR_MORE and ranks > 1 and layers < 2 * ranks:
            raise PipelineError(
                f"schedule={schedule!r} has two stages a rank, and {layers} layers are too few for {ranks} ranks: use "
                "another schedule or fewer ranks"
            )
        if cap is not None and schedule not in _CAPPED:
            raise PipelineError(
                f"activation_cap={show_bytes(cap)} is not kept by schedule={schedule!r}, but by {', '.join(_CAPPED)} "
                "only: choose one of them, or leave it out"
            )

    def plan(self, micro_batches: int) -> PipelinePlan:
        """A pipeline of so many micro-batches.

        Raises:
            PipelineError: the schedule cannot have so many, or the cap is too low.
        """
        if self._chosen is None and self._split == "fastest":
            return self._choose(micro_batches)
        if self._chosen is None:
            measured, self._costs = self._costs, self._costs.nominal
            try:
                self._choose(micro_batches)
            finally:
                self._costs = measured
                self._found.clear()
        assert self._chosen is not None
        return self._planned(*self._chosen, micro_batches)

    def know(self, times: Mapping[int, tuple[float, float, float]]) -> None:
        """Plan with measured times from now on; stages stay as they are and where they are.

        Args:
            times: milliseconds of F, O and W, by stage.
        """
        assert self._chosen is not None
        by_kind = zip(*(times[stage] for stage in range(self._chosen[1])), strict=True)
        forward, output, weight = (tuple(values) for values in by_kind)
        self._measured = StageCosts(forward, output, weight, self._bytes_of(*self._chosen))

    def weight_share(self, stage: int) -> float:
        """Return the share of W in O and W together, as measured in the first batch."""
        assert self._chosen is not None
        stage_of, stages = self._stage_of(*self._chosen), self._chosen[1]
        _, output, weight = (_by_stage(times, stage_of, stages) for times in self._costs.by_kind)
        both = output[stage] + weight[stage]
        return weight[stage] / both if both else 0.5

    def _choose(self, micro_batches: int) -> PipelinePlan:
        """The plan whose schedule and stages hold from now on."""
        plans = self._tried(micro_batches)
        if self._split == "even":
            of_stages = ((_by_stage(self._sizes, plan.stage_of, plan.stages), plan.rank_of) for plan in plans)
            most = [max(_by_stage(sizes, rank_of, self._ranks)) for sizes, rank_of in of_stages]
            plans = [plan for plan, size in zip(plans, most, strict=True) if size <= min(most) * _AS_EVEN]
        longest = min(plan.makespan_ms or 0.0 for plan in plans) * _AS_GOOD
        good = [plan for plan in plans if (plan.makespan_ms or 0.0) <= longest]
        best = min(good, key=lambda plan: (plan.stages, plan.makespan_ms or 0.0))
        self._chosen, self._rank_of = (best.name, best.stages), best.rank_of
        return best

    @property
    def _sizes(self) -> list[int]:
        """Sizes for an even split: bytes of parameters, and a little for layers that have none; sums are exact."""
        sizes = self._costs.parameter_bytes or (0,) * len(self._costs.forward_ms)
        return [_FULL_LAYER * len(sizes) * size + (sum(sizes) or 1) for size in sizes]

    def _tried(self, micro_batches: int) -> list[PipelinePlan]:
        """A plan for each way to cut the layers.

        Raises:
            PipelineError: none is possible.
        """
        if self._schedule != _ANY:
            cuts = self._cuts(self._schedule)
            if not cuts:
                many = "two a rank" if self._schedule in _TWO_CHUNKS else "the same number for each rank"
                raise PipelineError(
                    f"split names {len(self._split)} stages, and schedule={self._schedule!r} has "
                    f"{'one a rank' if self._schedule in _ONE_CHUNK else many} on {self._ranks} ranks: "
                    f"{self._other_split(self._schedule)}"
                )
            return [self._planned(self._schedule, stages, micro_batches) for stages in cuts]
        plans: list[PipelinePlan] = []
        refused: list[PipelineError] = []
        for kind in _SEARCHED:
            for stages in self._cuts(kind):
                try:
                    plans.append(self._planned(kind, stages, micro_batches))
                except PipelineError as error:  # such as a cap that other cuts can keep
                    refused.append(error)
        if refused and not plans:
            raise min(refused, key=lambda error: error.least if isinstance(error, _CapTooLowError) else 0)
        if not plans:
            raise PipelineError(
                f"split names {len(self._split)} stages, and schedule='ooo' has a multiple of {self._ranks} on as many "
                f"ranks: {self._other_split(_ANY)}"
            )
        return plans

    def _other_split(self, kind: str) -> str:
        """Advice on what to change where the stages that ``split`` names do not fit the ranks."""
        one, two = self._ranks, 2 * self._ranks
        number = (
            one if kind in _ONE_CHUNK else two if kind in _TWO_CHUNKS else f"{one}, {two} or another multiple of {one}"
        )
        return f"name {number} layers that stages begin with, or use split='even'"

    def _cuts(self, kind: str) -> list[int]:
        """Numbers of stages that are possible."""
        ranks = self._ranks
        if isinstance(self._split, tuple):
            named = len(self._split)
            fits = named == ranks if kind in _ONE_CHUNK else named % ranks == 0
            if kind in _TWO_CHUNKS and ranks > 1:
                fits = named == 2 * ranks
            return [named] if fits else []
        if self._split == "even" and self._group == "auto" and ranks > 1:
            return [stages for stages in self._any_cuts(kind) if stages <= 2 * ranks]
        return self._any_cuts(kind)

    def _any_cuts(self, kind: str) -> list[int]:
        layers, ranks = len(self._costs.forward_ms), self._ranks
        if kind in _ONE_CHUNK or ranks == 1:
            return [ranks]
        if kind in _TWO_CHUNKS:
            two = [2 * ranks] if layers >= 2 * ranks else []
            return [*two, layers] if kind == "ooo_v" and layers > 2 * ranks else two
        most = layers // ranks
        if self._group != "auto":
            if not 1 <= self._group <= most:
                raise PipelineError(f"group={self._group}: {layers} layers on {ranks} ranks leave 1 to {most}")
            return [ranks * max(1, most // self._group)]
        if kind in _TORCHS:
            return [ranks * min(2, most)]
        return [ranks * chunks for chunks in range(1, most + 1) if chunks <= 2 or most % chunks == 0][:12]

    def _planned(self, kind: str, stages: int, micro_batches: int) -> PipelinePlan:
        ranks, stage_of = self._ranks, self._stage_of(kind, stages)
        try:
            if ranks == 1 and kind in (*_TORCHS, "zbv"):  # one stage: there is nothing to interleave
                return replace(self._simulated("1f1b", stage_of, stages, micro_batches), name=kind)
            if kind in _TORCHS:
                orders, rank_of = torch_pipeline_orders(kind, ranks, micro_batches, stages // ranks)
                return PipelinePlan(kind, stage_of, rank_of, orders, micro_batches)
            return self._simulated(kind, stage_of, stages, micro_batches)
        except ValueError as error:
            if isinstance(error, PipelineError):
                raise
            raise PipelineError(f"schedule={self._schedule!r}: {error}") from error

    def _simulated(self, name: str, stage_of: tuple[int, ...], stages: int, micro_batches: int) -> PipelinePlan:
        costs, of_stages = self._costs, self._measured or self._estimated(name, stages)
        if self._rank_of is None:
            placement = _placement(name, stages, self._ranks, of_stages.total_ms if self._split == "fastest" else None)
        else:
            placement = Placement(self._rank_of)
        of_stages = _with_messages(of_stages, placement, costs.message_ms)
        alive = micro_batches if name in _FLUSH_FORMS else 1
        least = [alive * size for size in least_cap(placement, of_stages)]
        if self._cap is not None and self._cap < max(least):
            raise _CapTooLowError(self._schedule, self._cap, ceil(max(least)), least.index(max(least)), alive)
        if name in _SEARCHED:
            schedule = self._fastest(name, placement, of_stages, micro_batches)
        elif name in _FLUSH_FORMS:
            schedule, _ = list_schedule(
                placement,
                micro_batches,
                of_stages,
                hops=costs.hop_ms,
                cap=self._cap,
                rule=FLUSH,
                first_output_gradient=True,
            )
        else:
            schedule = _PUBLISHED[name](placement, micro_batches, first_output_gradient=True)
        self._found[name, stages, micro_batches] = schedule
        schedule = joined_gradients(schedule, placement, of_stages, hops=costs.hop_ms)
        ran = self._ran(schedule, placement, of_stages)
        return PipelinePlan(
            name, stage_of, placement.rank_of, orders_of(schedule), micro_batches, ran.makespan_ms, ran.bubble_share
        )

    def _stage_of(self, name: str, stages: int) -> tuple[int, ...]:
        layers = len(self._costs.forward_ms)
        if isinstance(self._split, tuple):
            return tuple(bisect_right(self._split, layer) - 1 for layer in range(layers))
        if (name, stages) not in self._cut:
            if self._split == "fastest":
                self._cut[name, stages] = block(layers, stages, costs=self._costs.total_ms).rank_of
            else:
                self._cut[name, stages] = even_stages(self._sizes, _placement(name, stages, self._ranks, None).rank_of)
        return self._cut[name, stages]

    def _bytes_of(self, name: str, stages: int) -> tuple[float, ...]:
        return _by_stage(self._costs.saved_bytes, self._stage_of(name, stages), stages)

    def _estimated(self, name: str, stages: int) -> StageCosts:
        """Return the stages' costs by what the layers took in the first batch."""
        costs, stage_of = self._costs, self._stage_of(name, stages)
        forward, output, weight = (
            tuple(took + costs.task_ms for took in _by_stage(times, stage_of, stages)) for times in costs.by_kind
        )
        return StageCosts(forward, output, weight, self._bytes_of(name, stages))

    def _fastest(self, name: str, placement: Placement, costs: StageCosts, micro_batches: int) -> Schedule:
        """The shortest of the list schedules, the last one and, within the cap, a published order of the allocation."""
        listed = fastest_list_schedule(
            placement, micro_batches, costs, hops=self._costs.hop_ms, cap=self._cap, first_output_gradient=True
        )
        orders = [listed]
        before = self._found.get((name, placement.stages, micro_batches))
        if before is not None:
            orders.append(before)
        with suppress(ValueError):  # such as micro-batches that do not fill its rounds
            published = _FAST_FORWARDING[name](placement, micro_batches, first_output_gradient=True)
            if self._cap is None or max(self._ran(published, placement, costs).peak_bytes) <= self._cap:
                orders.append(published)
        took = [self._ran(order, placement, costs).makespan_ms for order in orders]
        longest = min(took) * (1.0 if self._measured is None else _AS_SHORT)
        hops = self._costs.hop_ms

        def splits(order: Schedule) -> int:
            joined = orders_of(joined_gradients(order, placement, costs, hops=hops))
            return sum(kind == "W" for tasks in joined.values() for kind, _, _ in tasks)

        good = [order for order, ms in zip(orders, took, strict=True) if ms <= longest]
        return min(good, key=splits) if len(good) > 1 else good[0]

    def _ran(self, schedule: Schedule, placement: Placement, costs: StageCosts) -> PipelineTimeline:
        return simulate_pipeline(schedule, placement, costs, hops=self._costs.hop_ms)


def _placement(name: str, stages: int, ranks: int, costs: Sequence[float] | None) -> Placement:
    if ranks > 1 and name in _TWO_CHUNKS:
        return v_shape(stages, ranks, costs=costs if name == "ooo_v" else None)
    return block(stages, ranks) if name in _ONE_CHUNK else modulo(stages, ranks)


def _with_messages(costs: StageCosts, placement: Placement, took_ms: float) -> StageCosts:
    """F and O of each stage with what it sends to other ranks and receives from them."""
    rank_of = placement.rank_of
    ends = [
        sum(rank_of[other] != rank for other in (stage - 1, stage + 1) if 0 <= other < len(rank_of))
        for stage, rank in enumerate(rank_of)
    ]
    forward, output = (
        tuple(own + took_ms * count for own, count in zip(times, ends, strict=True))
        for times in (costs.forward_ms, costs.output_gradient_ms)
    )
    return replace(costs, forward_ms=forward, output_gradient_ms=output)


def _by_stage(values: Sequence[float], stage_of: tuple[int, ...], stages: int) -> tuple[float, ...]:
    sums = [0.0] * stages
    for stage, value in zip(stage_of, values, strict=True):
        sums[stage] += value
    return tuple(sums)
