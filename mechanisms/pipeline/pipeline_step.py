"""Training steps of one model that is spread over the ranks of a group (Oh et al. 2022, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.mechanisms.memory.batches import balanced_parts, loss_of, samples_in
from retime.mechanisms.memory.sandbox import Undo, random_state, set_random_state
from retime.mechanisms.pipeline.errors import PipelineError, RankLostError
from retime.mechanisms.pipeline.find_layers import find_layers
from retime.mechanisms.pipeline.gates import LayerGates
from retime.mechanisms.pipeline.losses import Reduction, reduction_of, weights_of
from retime.mechanisms.pipeline.ownership import Ownership, Reached
from retime.mechanisms.pipeline.plan import Costs, PipelinePlan, Planner, check_schedule
from retime.mechanisms.pipeline.relay import Relay
from retime.mechanisms.pipeline.report import PipelineReport
from retime.mechanisms.pipeline.stage import Stage
from retime.mechanisms.pipeline.survey import Survey, survey
from retime.mechanisms.pipeline.suspended_call import Returned, SuspendedCall, Workers
from retime.mechanisms.pipeline.training_call import AtEdge, TrainingCall
from retime.mechanisms.pipeline.values import TensorKind, shapes_of
from retime.mechanisms.torch_private import pipeline_runtime
from retime.mechanisms.weight_gradients import SplitBackward

__all__ = ["MicroBatchResult", "PipelineStep"]

Group = int | Literal["auto"]


@dataclass(frozen=True)
class MicroBatchResult:
    """What a step returned for one micro-batch; on the rank of the last stage only.

    Attributes:
        output: of the step; its loss is detached.
        weight: of its loss in the batch's.
    """

    output: Any
    weight: float


class _Whole(nn.Module):
    """Runs a stretch of a step, as if it were a module's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, stretch: Callable[[], Any]) -> Any:
        return stretch()


class PipelineStep:
    """Runs a step's forward and backward passes over the ranks of a group, micro-batch by micro-batch.

    The first batch is run whole on each rank, without a trace: this shows what goes between the layers, what they take,
    and whether micro-batches give the batch's loss. Then each rank keeps its stages only.

    Args:
        model: the same on all ranks, whole, with the same values.
        group: the ranks of the pipeline; None: all.
        data_group: ranks with the same stages, which add their gradients up; None: this rank is alone.
        microbatches: of each batch.
        schedule: one of :data:`~retime.mechanisms.pipeline.SCHEDULES`, or a schedule of torch's own by name.
        layers: path of the ``Sequential`` or ``ModuleList`` that is cut; None: to be found.
        layers_per_stage: under modulo allocation; ``"auto"``: those that give the shortest simulated step.
        activation_cap: bytes of activations that a rank may keep.
        quiet: a context around runs that are only tried out.

    Raises:
        PipelineError: there is nothing to cut.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: Any = None,
        data_group: Any = None,
        microbatches: int,
        schedule: str = "ooo2",
        layers: str | None = None,
        layers_per_stage: Group = "auto",
        activation_cap: int | None = None,
        quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        if microbatches < 1:
            raise ValueError(f"microbatches={microbatches}: give 1 or more")
        self._model = model
        self._group = dist.group.WORLD if group is None else group
        self._data_group = data_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._microbatches, self._quiet = microbatches, quiet
        self._schedule, self._layers_per_stage, self._cap = check_schedule(schedule), layers_per_stage, activation_cap
        self._list = find_layers(model, layers, self._ranks)
        self._names = [f"{self._list.path}.{number}" for number in range(len(self._list.modules))]
        self._gates = LayerGates(self._list.modules)
        self._workers = Workers()
        self._device = next(model.parameters()).device
        self._planner: Planner | None = None
        self._plan: PipelinePlan | None = None
        self._split: SplitBackward | None = None
        self._whole: _Whole | None = None
        self._owners: Ownership | None = None
        self._reduction: Reduction = "mean"
        self._outputs: dict[Any, Any] = {}
        self._positions: dict[int, list[int]] = {}
        self._needs_gradient: dict[int, list[bool]] = {}
        self._reads: dict[tuple[int, Any], list[TensorKind]] = {}
        self._stage_parameters: dict[int, list[Tensor]] = {}
        self._frozen: tuple[bool, ...] = ()
        self._outside: list[str] = []
        self._late: list[Tensor] = []
        self._works: list[tuple[Any, Tensor, list[Tensor]]] = []
        self._report = PipelineReport()
        self._now: _Now | None = None

    @property
    def is_spread(self) -> bool:
        """Whether each rank has its stages only."""
        return self._owners is not None

    @property
    def owners(self) -> Ownership:
        """Who has which parameters.

        Raises:
            RuntimeError: no batch has been seen yet.
        """
        if self._owners is None:
            raise RuntimeError("the model is whole on all ranks before its first batch")
        return self._owners

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        assert self._plan is not None
        return self._plan.rank_of[-1] == self._rank

    @property
    def last_rank(self) -> int:
        """The rank of the group that computes the loss."""
        assert self._plan is not None
        return self._plan.rank_of[-1]

    def train(self, step: Callable[[Any], Any], batch: Any, *, divide_by: int = 1) -> list[MicroBatchResult]:
        """Add the gradients of a batch to ``.grad``; all ranks call this with the same batch.

        Args:
            step: the training step; what it returns is a loss or has one.
            batch: whole.
            divide_by: of the loss before its backward pass.

        Returns:
            What the step returned, by micro-batch; empty on ranks without the last stage.

        Raises:
            PipelineError: the model or the batch cannot go through a pipeline.
            RankLostError: another rank did not send what it should have.
        """
        parts = balanced_parts(batch, -(-samples_in(batch) // self._microbatches))
        if self._owners is None:
            self._begin(step, batch, parts)
        assert self._owners is not None
        if self._frozen != self._flags():
            raise PipelineError(
                "parameters were frozen or thawed while training goes on: a pipeline's ranks have divided them by "
                "what was trained in the first batch. Freeze or thaw before the fit"
            )
        for part in parts:
            self._know(step, part)
        seeds = torch.randint(2**62, (len(parts),)).tolist()
        random, kept = random_state(), self._owners.keep_gradients()
        try:
            results = self._run(step, parts, seeds, divide_by)
        finally:
            set_random_state(random)
        self._owners.sum_shared(kept)
        self._reduce_shared()
        self._refuse_strays()
        return results

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, steps without gradients run over the ranks; all ranks run the same ones, and get all values."""
        if self._owners is None:
            yield
            return
        assert self._plan is not None
        self._gates.visitor = Relay(self._plan, self._group, self._device, self._outputs)
        try:
            yield
        finally:
            self._gates.visitor = self._training_call()

    @contextmanager
    def outside_whole(self) -> Iterator[None]:
        """Inside, what lies in front of the layers and behind them is on all ranks."""
        if self._owners is None:
            yield
            return
        with self._owners.whole(self._outside):
            yield

    def gather(self, mine: Any) -> list[Any] | None:
        """What each rank of the pipeline gives, on its first; None on others. All ranks call this."""
        everyone: list[Any] | None = [None] * self._ranks if self._rank == 0 else None
        dist.gather_object(mine, everyone, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return everyone

    def tell(self, what: Any) -> Any:
        """What the rank of the last stage gives, on all ranks; all ranks call this."""
        told = [what]
        dist.broadcast_object_list(told, dist.get_global_rank(self._group, self.last_rank), group=self._group)
        return told[0]

    def total_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients of parameters on all ranks; all ranks call this."""
        counted = self.owners.norm_parts()
        gradients = [p.grad for p in parameters if p in counted and p.grad is not None]
        square = nn.utils.get_total_norm(gradients).square() if gradients else torch.zeros((), device=self._device)
        square = square.float()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def restore(self) -> None:
        """Give each rank the whole model back; all ranks call this."""
        if self._owners is not None:
            self._owners.fetch()
        self.remove()

    def remove(self) -> None:
        """Leave the model as it is: on each rank, its own stages."""
        self._gates.remove()
        self._workers.stop()
        if self._split is not None:
            self._split.remove()
        self._split = self._owners = None

    def report(self) -> PipelineReport:
        """What was done so far, on this rank."""
        if self._split is not None:
            self._report.layers_in_order = {
                reason: count for reason, count in self._split.layers_in_order.items() if "first step" not in reason
            }
        return self._report

    # The first batch

    def _begin(self, step: Callable[[Any], Any], batch: Any, parts: Sequence[Any]) -> None:
        self._same_on_all(batch)
        undo = Undo(self._model, batch)
        try:
            with self._quiet():
                self._reduction = reduction_of(self._model, step, batch, parts)
                undo.put_back()
                found = survey(lambda: _seeded(step, parts[0]), self._gates, self._names)
                undo.put_back()
                self._outputs = found.outputs
                self._plan = self._planned(found, len(parts))
                self._look(step, parts[0], found)
        finally:
            undo.put_back()
            self._gates.visitor = None
        del undo, found
        assert self._owners is not None
        self._owners.free()
        self._gates.visitor = self._training_call()

    def _same_on_all(self, batch: Any) -> None:
        from retime.mechanisms.pipeline.values import tensors_in_order

        sums = [(tuple(t.shape), float(t.detach().double().sum())) for t in tensors_in_order(batch)]
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, sums, group=self._group)
        if any(one != everyone[0] for one in everyone):
            raise PipelineError(
                "the ranks of a pipeline were given different batches: each needs the same one. Give the sampler "
                "num_replicas and rank of the data parallel ranks, or leave it to the Trainer"
            )

    def _planned(self, found: Survey, micro_batches: int) -> PipelinePlan:
        hop = self._hop_ms(max((sum(t.nbytes for t in given) for given in found.given), default=0))
        told = [Costs(tuple(found.forward_ms), tuple(found.saved_bytes), hop)]
        dist.broadcast_object_list(told, dist.get_global_rank(self._group, 0), group=self._group)
        self._planner = Planner(self._schedule, self._ranks, told[0], group=self._layers_per_stage, cap=self._cap)
        return self._planner.plan(micro_batches)

    def _hop_ms(self, nbytes: int) -> float:
        """Of a message of so many bytes from rank 0 to rank 1, as rank 0 sees it."""
        import time

        if self._ranks < 2 or self._rank > 1:
            return 0.0
        message = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=self._device)
        peer = dist.get_global_rank(self._group, 1 - self._rank)
        took = []
        for _ in range(4):
            start = time.perf_counter()
            for sends in (self._rank == 0, self._rank == 1):
                (dist.send if sends else dist.recv)(message, peer, self._group)  # type: ignore[operator]
            took.append((time.perf_counter() - start) / 2)
        return 1000 * min(took[1:])

    def _look(self, step: Callable[[Any], Any], part: Any, found: Survey) -> None:
        """Run one micro-batch in stages on this rank alone: what a stage must be sent, and which parameters it uses."""
        plan = self._plan
        assert plan is not None
        self._whole = _Whole(self._model)
        self._split = SplitBackward(self._whole)
        self._gates.visitor = self._training_call()
        firsts = [plan.layers_of(stage)[0] for stage in range(plan.stages)]
        mine = self._mine(plan)
        positions: dict[int, list[int]] = {}
        edges: dict[int, list[Tensor]] = {}
        call = SuspendedCall(lambda: _seeded(step, part), self._workers)
        try:
            answer: Any = call.resume()
            for stage in mine:
                given = found.given[firsts[stage]]
                while isinstance(answer, AtEdge) and answer.stage != stage:
                    answer = call.resume()
                assert isinstance(answer, AtEdge)
                follows = stage - 1 in mine  # nothing is sent, but each stage has a graph of its own
                if stage:
                    positions[stage] = [
                        place
                        for place, one in enumerate(answer.given)
                        if not _equal(one, given[place]) or (follows and one.requires_grad)
                    ]
                sent = {place: _leaf(given[place]) for place in positions.get(stage, [])}

                def stretch(sent: dict[int, Tensor] = sent) -> Any:
                    return call.resume(sent)

                with self._split.begin(("look", stage)):
                    answer = self._whole(stretch)
                edges[stage] = [loss_of(answer.value)] if isinstance(answer, Returned) else answer.given
        finally:
            call.close()
        self._agree(positions, edges, found, mine)
        for stage in mine:
            self._split.drop(("look", stage))

    def _agree(
        self, positions: dict[int, list[int]], edges: dict[int, list[Tensor]], found: Survey, mine: list[int]
    ) -> None:
        plan, split = self._plan, self._split
        assert plan is not None
        assert split is not None
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, positions, group=self._group)
        for one in everyone:
            self._positions |= one
        roots: dict[int, list[Tensor]] = {}
        flags: dict[int, list[bool]] = {}
        for stage in mine:
            if stage + 1 == plan.stages:
                roots[stage] = edges[stage]
            else:
                roots[stage] = [edges[stage][place] for place in self._positions[stage + 1]]
                flags[stage + 1] = [tensor.requires_grad for tensor in roots[stage]]
        dist.all_gather_object(everyone, flags, group=self._group)
        for one in everyone:
            self._needs_gradient |= one
        graphs = {stage: Reached(roots[stage]) for stage in mine}
        self._refuse_crossing(graphs)
        reached = {stage: graph.leaves for stage, graph in graphs.items()}
        if plan.stages - 1 in mine and not any(root.requires_grad for root in roots[plan.stages - 1]):
            raise PipelineError("the loss of training_step has no gradient: nothing of the model is trained")
        split.watch([root for stage in mine for root in roots[stage]])
        layers = [self._list.modules[layer] for stage in mine for layer in plan.layers_of(stage)]
        self._owners = Ownership(self._model, set().union(*reached.values()) if reached else set(), self._group, layers)
        self._remember(found, mine, reached)

    def _refuse_crossing(self, graphs: dict[int, Reached]) -> None:
        stages = sorted(graphs)
        for number, later in enumerate(stages):
            for earlier in stages[:number]:
                if graphs[later].nodes & graphs[earlier].nodes:
                    raise PipelineError(
                        f"stages {earlier + 1} and {later + 1} lie on one rank and both use a tensor that was computed "
                        "with gradients in front of the layers (a skip connection): use a schedule with one stage a "
                        "rank, such as schedule='ooo1' or '1f1b'"
                    )

    def _remember(self, found: Survey, mine: list[int], reached: dict[int, set[Tensor]]) -> None:
        owners, plan = self._owners, self._plan
        assert owners is not None
        assert plan is not None
        inside = {p for module in self._list.modules for p in module.parameters()}
        self._outside = [name for name, p in owners.parameters.items() if p not in inside]
        shared = {owners.parameters[name] for name in owners.shared}
        twice = {p for a in mine for b in mine if a < b for p in reached[a] & reached[b]}
        known = set(owners.parameters.values())
        ordered = list(owners.parameters.values())
        for stage in mine:
            chosen = (reached[stage] & known) - shared - twice
            self._stage_parameters[stage] = [p for p in ordered if p in chosen]
        late = (shared | twice) & set().union(*reached.values()) if reached else set()
        self._late = [p for p in ordered if p in late]
        self._frozen = self._flags()
        self._report = PipelineReport(
            schedule=plan.name,
            layers=self._list.path,
            stages=plan.stages,
            stages_here=tuple(mine),
            parameter_bytes=owners.bytes_here,
            parameter_bytes_of_all=owners.bytes_of_all,
            simulated_bubble_share=plan.bubble_share[self._rank] if plan.bubble_share else None,
        )

    # Every batch

    def _know(self, step: Callable[[Any], Any], part: Any) -> None:
        """Run a micro-batch of shapes that were not there before in a relay, so that each rank knows what it is sent."""
        assert self._plan is not None
        key = shapes_of(part)
        if (0, key) in self._reads:
            return
        relay = Relay(self._plan, self._group, self._device, self._outputs)
        undo = Undo(self._model, part, parameters=False)
        try:
            with self._quiet(), self.outside_whole(), torch.no_grad():
                self._gates.visitor = relay
                _seeded(step, part)
        finally:
            undo.put_back()
            self._gates.visitor = self._training_call()
        for stage in range(self._plan.stages):
            given = relay.given[self._plan.layers_of(stage)[0]]
            places, flags = self._positions.get(stage, []), self._needs_gradient.get(stage, [])
            self._reads[stage, key] = [
                replace(given[place], requires_grad=flag) for place, flag in zip(places, flags, strict=True)
            ]

    def _run(
        self, step: Callable[[Any], Any], parts: Sequence[Any], seeds: list[int], divide_by: int
    ) -> list[MicroBatchResult]:
        assert self._planner is not None
        assert self._split is not None
        plan = self._plan
        if plan is None or plan.micro_batches != len(parts):
            plan = self._plan = self._planner.plan(len(parts))
        weights = weights_of(self._reduction, parts)
        now = self._now = _Now(self, step, parts, seeds, weights, divide_by)
        stages = [
            Stage(stage, plan.rank_of, self._group, self._device, now.forward, self._split, now.reads, self._stage_done)
            for stage in self._mine(plan)
        ]
        runtime = pipeline_runtime(stages, len(parts), plan.orders)
        try:
            runtime.run()
        except RuntimeError as error:
            awaited = next((stage.awaited for stage in stages if stage.awaited), "another rank")
            if _is_lost(error):
                raise RankLostError(
                    f"a message of {awaited} did not come, as it has ended or failed: look at its error. ({error})"
                ) from error
            raise
        finally:
            now.close()
            self._now = None
            for key in self._split.in_flight:
                self._split.drop(key)
        self._end_reductions()
        self._note(stages, plan)
        return now.results

    def _note(self, stages: Sequence[Stage], plan: PipelinePlan) -> None:
        spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: span.start_s)
        report = self._report
        report.steps += 1
        report.micro_batches = plan.micro_batches
        report.spans = spans
        if spans:
            whole = max(span.end_s for span in spans) - spans[0].start_s
            report.bubble_share = max(0.0, 1 - sum(span.end_s - span.start_s for span in spans) / whole) if whole else 0

    def _stage_done(self, stage: int) -> None:
        """All gradients of a stage are there: those of other data parallel ranks are added while others go on."""
        self._reduce(self._stage_parameters[stage])

    def _reduce_shared(self) -> None:
        self._reduce(self._late)
        self._end_reductions()

    def _reduce(self, parameters: list[Tensor]) -> None:
        if self._data_group is None or not parameters:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for some in by_type.values():
            flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in some])
            flat /= dist.get_world_size(self._data_group)
            work = dist.all_reduce(flat, group=self._data_group, async_op=True)
            self._works.append((work, flat, some))

    def _end_reductions(self) -> None:
        for work, flat, parameters in self._works:
            work.wait()
            for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = (
                    piece.view_as(parameter)
                    if parameter.grad is None
                    else parameter.grad.copy_(piece.view_as(parameter))
                )
        self._works = []

    def _refuse_strays(self) -> None:
        assert self._owners is not None
        for name in self._owners.unreached:
            parameter = self._owners.parameters[name]
            if parameter.requires_grad and parameter.grad is not None:
                raise PipelineError(
                    f"{name!r} got a gradient that it did not get in the first batch, so it is not known which ranks "
                    "need it: use all trainable parameters in the first batch, or freeze this one"
                )

    def _training_call(self) -> TrainingCall:
        assert self._plan is not None
        return TrainingCall(self._plan, self._rank, self._device, self._outputs, self._names)

    def _mine(self, plan: PipelinePlan) -> list[int]:
        return [stage for stage, rank in enumerate(plan.rank_of) if rank == self._rank]

    def _flags(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._model.parameters())


class _Now:
    """The step that runs."""

    def __init__(
        self,
        pipeline: PipelineStep,
        step: Callable[[Any], Any],
        parts: Sequence[Any],
        seeds: list[int],
        weights: list[float],
        divide_by: int,
    ) -> None:
        self._pipeline, self._seeds, self._weights, self._divide_by = pipeline, seeds, weights, divide_by
        self._keys = [shapes_of(part) for part in parts]
        self._calls = [
            SuspendedCall(lambda part=part: step(part), pipeline._workers)  # type: ignore[misc]
            for part in parts
        ]
        self._at: list[Any] = [None] * len(parts)
        self._results: dict[int, MicroBatchResult] = {}

    @property
    def results(self) -> list[MicroBatchResult]:
        return [self._results[batch] for batch in sorted(self._results)]

    def reads(self, stage: int, batch: int) -> list[TensorKind]:
        return self._pipeline._reads[stage, self._keys[batch]]

    def forward(self, stage: int, batch: int, received: list[Tensor]) -> list[Tensor]:
        pipeline = self._pipeline
        plan, whole = pipeline._plan, pipeline._whole
        assert plan is not None
        assert whole is not None
        call = self._calls[batch]
        if self._at[batch] is None:
            torch.manual_seed(self._seeds[batch])
            self._at[batch] = call.resume()
        answer = self._at[batch]
        while isinstance(answer, AtEdge) and answer.stage != stage:
            answer = call.resume()
        if not isinstance(answer, AtEdge):
            raise PipelineError(
                f"training_step did not come to {pipeline._names[plan.layers_of(stage)[0]]!r}, as it did in the first "
                "batch: a pipeline needs each layer once in every micro-batch"
            )
        sent = dict(zip(pipeline._positions.get(stage, []), received, strict=True))
        if stage:  # the first one draws what it draws without a pipeline
            torch.manual_seed((self._seeds[batch] + 0x9E3779B97F4A7C15 * (stage + 1)) % 2**63)
        answer = whole(lambda: call.resume(sent))
        self._at[batch] = answer
        if isinstance(answer, Returned):
            return [self._loss(batch, answer.value)]
        places = pipeline._positions[stage + 1]
        return [answer.given[place] for place in places]

    def close(self) -> None:
        for call in self._calls:
            call.close()

    def _loss(self, batch: int, output: Any) -> Tensor:
        try:
            loss = loss_of(output)
        except ValueError as error:
            raise PipelineError(f"training_step gave no loss for a micro-batch: {error}") from error
        self._results[batch] = MicroBatchResult(_detached(output), self._weights[batch])
        pipeline = self._pipeline
        assert pipeline._split is not None
        loss = loss * (self._weights[batch] / self._divide_by)
        return loss


def _seeded(step: Callable[[Any], Any], part: Any) -> Any:
    torch.manual_seed(0)
    return step(part)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_(leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {key: _detached(value) for key, value in output.items()}
    return output


def _is_lost(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "timed out", "timeout", "peer", "socket"))
