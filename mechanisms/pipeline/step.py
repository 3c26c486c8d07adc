"""Training steps of one model that is spread over the ranks of a group (Oh et al. 2022, section 5.2)."""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.messages import Report, each_because, show_bytes, warn_no_effect
from retime.foundations.parts import balanced_parts, samples_in
from retime.foundations.preserve_state import preserve_state, random_state, reachable_tensors, set_random_state
from retime.foundations.torch_private.distributed import pipeline_runtime
from retime.foundations.torch_private.tensors import post_accumulate_hooks
from retime.mechanisms.pipeline.calls import LayerInterceptors, Workers, shapes_of_batch
from retime.mechanisms.pipeline.checks import (
    ChangedBuffers,
    PipelineError,
    broadcast_object,
    messages_of,
    messages_of_group,
    warn_of_gradient_hooks,
)
from retime.mechanisms.pipeline.first_batch import FirstBatch, agreed_seeds, seeded
from retime.mechanisms.pipeline.layers import LayerList, call_chain, find_layers, first_layers, warn_of_no_list
from retime.mechanisms.pipeline.losses import FirstLook, LossWeight, LossWeights
from retime.mechanisms.pipeline.meta_device import DeferredInitModel
from retime.mechanisms.pipeline.ownership import GradientSums, Ownership, gathered
from retime.mechanisms.pipeline.plan import PipelinePlan, Planner, check_schedule
from retime.mechanisms.pipeline.running import MicroBatchResult, PipelineState, RankInfo, RunningStep
from retime.mechanisms.pipeline.stage import Span, Stage
from retime.schedules.pipeline import lane_name
from retime.schedules.schedule import Kind
from retime.schedules.timeline import Span as TimelineSpan

_WORDS = {str(kind): kind.words for kind in Kind} | {"B": "both gradients"}

# What a pipeline did.


@dataclass
class PipelineReport(Report):
    """Report of this rank; empty before the first step.

    Attributes:
        layers: the list that the model was cut in.
        stages: of all ranks together.
        stages_here: the stages of this rank, from 0.
        micro_batches: of the last step.
        steps_by_micro_batches: how many steps had so many.
        parameter_bytes: of the parameters on this rank.
        parameter_bytes_by_rank: on each rank of the pipeline; of weights that several use, on each of them.
        parameter_bytes_of_all: of all parameters.
        bubble_share: the share of the last step, from its first to its last task on this rank, without a task.
        simulated_bubble_share: what the simulation said for this rank; None for schedules of torch's own.
        layers_in_order: layers whose weight gradients do not wait, by reason.
        spans: the tasks of the last step on this rank.
    """

    schedule: str = ""
    layers: str = ""
    stages: int = 0
    stages_here: tuple[int, ...] = ()
    micro_batches: int = 0
    steps_by_micro_batches: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    parameter_bytes: int = 0
    parameter_bytes_by_rank: tuple[int, ...] = ()
    parameter_bytes_of_all: int = 0
    bubble_share: float = 0.0
    simulated_bubble_share: float | None = None
    layers_in_order: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def note(self, stages: Sequence[Stage], plan: PipelinePlan, rank: int) -> None:
        """One more step has run on this rank."""
        self.steps += 1
        self.micro_batches = plan.micro_batches
        self.steps_by_micro_batches[plan.micro_batches] = self.steps_by_micro_batches.get(plan.micro_batches, 0) + 1
        self.simulated_bubble_share = plan.bubble_share[rank] if plan.bubble_share else None
        self.spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: span.start_s)
        whole = max(span.end_s for span in self.spans) - self.spans[0].start_s
        busy = sum(span.end_s - span.start_s for span in self.spans)
        self.bubble_share = max(0.0, 1 - busy / whole) if whole else 0.0

    def what_was_done(self) -> list[str]:
        if not self.stages:
            return ["pipeline: no step yet"]
        steps = self.steps_by_micro_batches
        usual, *others = sorted(steps, key=lambda count: (-steps[count], count)) or [0]
        rest = f" ({', '.join(f'{steps[count]} of {count}' for count in others)})" if others else ""
        here = ", ".join(str(stage + 1) for stage in self.stages_here)
        mine, whole = show_bytes(self.parameter_bytes), show_bytes(self.parameter_bytes_of_all)
        return [
            f"pipeline: {self.steps} steps of {usual} micro-batches{rest} by {self.schedule} through {self.stages} "
            f"stages of {repr(self.layers) if self.layers else 'the model'}",
            f"this rank has stage{'s' * (len(self.stages_here) > 1)} {here} with {mine} of {whole} of parameters",
        ]

    def what_stayed_plain(self) -> list[str]:
        return each_because(self.layers_in_order, "layers' weight gradients in order")

    def what_was_measured(self) -> list[str]:
        if not self.stages:
            return []
        simulated = "" if self.simulated_bubble_share is None else f" (simulated: {self.simulated_bubble_share:.0%})"
        by_rank = ", ".join(map(show_bytes, self.parameter_bytes_by_rank))
        return [f"{self.bubble_share:.0%} of the last step without a task{simulated}", f"parameters by rank: {by_rank}"]

    def what_to_try(self) -> list[str]:
        waits = (
            ["PipelineTimeline() among a Trainer's callbacks draws which rank waits when"] if self.bubble_share else []
        )
        return super().what_to_try() + waits

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"spans": [asdict(span) for span in self.spans]}


_ASK_AHEAD = 8
"""Tasks, by which gloo is asked for messages in advance: each holds memory from then on. NCCL's wait for each other."""
_MICRO_BATCHES_A_RANK = 2


class PipelineStep:
    """Runs a step's forward and backward passes over the ranks of a group, micro-batch by micro-batch.

    In a bare loop::

        pipeline = PipelineStep(model, microbatches=8)      # on all ranks, after init_process_group
        for batch in loader:                                # the same batch on all of them
            results = pipeline.train(lambda part: loss_fn(model(part[0]), part[1]), batch)
            optimizer.step()
            optimizer.zero_grad()
        pipeline.restore()                                  # the model is whole again

    The first batch is run whole on each rank, without a trace: this shows what goes between the layers, what they take,
    and whether micro-batches give the batch's loss. Then each rank keeps its stages only.

    Args:
        model: the same on all ranks, whole, with the same values.
        group: the ranks of the pipeline; None: all.
        data_group: ranks with the same stages, whose gradients are averaged; None: this rank is alone.
        microbatches: of each batch; batches of fewer samples have fewer. ``"auto"``: two for each rank.
        schedule: one of :data:`~retime.mechanisms.pipeline.SCHEDULES`, or a schedule of torch's own by name.
        layers: path of the ``Sequential`` or ``ModuleList`` that is cut; None: to be found, and where there is
            none, the modules that the first step calls once each, in that order, with a warning; ``"auto"``: without.
        layers_per_stage: under modulo allocation; ``"auto"``: one or two stages a rank, or with ``split="fastest"``
            those that give the shortest simulated step.
        activation_cap: bytes of activations that a rank may keep.
        split: how layers become stages: ``"even"``: each rank has as equal a share of the parameters' bytes as whole
            layers allow, the same in every run; ``"fastest"``: by measured times; or each stage's first layer.
        loss_weight: what a step divides its sum by, where its operations do not tell: ``"samples"``, ``"sum"``
            (nothing), or a function from a batch to a number, called with the whole batch and with each micro-batch,
            which counts ``loss_weight(micro_batch) / loss_weight(batch)``.
        quiet: a context around runs that are only tried out.
        hollow: the model, if it was built on the meta device: each rank fills its own layers only, and keeps them.

    Raises:
        PipelineError: there is nothing to cut.
        ValueError: an argument is out of its range.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        microbatches: Annotated[int, AtLeast(1)] | Literal["auto"],
        schedule: str = "ooo2",
        layers: str | None = None,
        layers_per_stage: Annotated[int, AtLeast(1)] | Literal["auto"] = "auto",
        activation_cap: Annotated[int, AtLeast(1)] | None = None,
        split: Literal["even", "fastest"] | Sequence[str] = "even",
        loss_weight: LossWeight | None = None,
        quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
        hollow: DeferredInitModel | None = None,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        self._is_asked = microbatches != "auto"
        if microbatches == "auto":
            microbatches = _MICRO_BATCHES_A_RANK * dist.get_world_size(group)
        self.microbatches: int = microbatches
        """Micro-batches of each batch with as many samples."""
        self._model, self._quiet = model, quiet
        self._split, self._path, self._loss_weight = split, layers, loss_weight
        self._layers_per_stage = layers_per_stage
        self._planner_of = partial(Planner, check_schedule(schedule), group=layers_per_stage, cap=activation_cap)
        self._layers = find_layers(model, layers, dist.get_world_size(group))
        self._place = RankInfo(group, data_group, next(model.parameters()).device, [])
        self._gates = LayerInterceptors([])
        if self._layers is not None:
            self._stand_at(self._layers)
        self._hollow = hollow
        if hollow is not None:
            if self._layers is None:
                raise PipelineError(
                    "parameters are on the meta device and no list of layers holds them, so none can have its values "
                    "while it runs: put the layers into an nn.Sequential, or build the module with values"
                )
            hollow.fill_outside(self._layers.modules)
            self._gates.around = hollow.filled
        self._workers = Workers()
        self._sums = GradientSums(data_group)
        self._spread: PipelineState | None = None
        self._frozen: tuple[bool, ...] = ()
        self._report = PipelineReport()

    @property
    def is_spread(self) -> bool:
        """Return whether each rank has its stages only."""
        return self._spread is not None

    @property
    def owners(self) -> Ownership:
        """Owners of the parameters.

        Raises:
            RuntimeError: no batch has been seen yet.
        """
        return self._known.owners

    @property
    def _known(self) -> PipelineState:
        if self._spread is None:
            raise RuntimeError("the model is whole on all ranks before its first batch")
        return self._spread

    @checked
    def train(
        self, step: Callable[[Any], Any], batch: Any, *, divide_by: Annotated[int, AtLeast(1)] = 1
    ) -> list[MicroBatchResult]:
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
        parts = balanced_parts(batch, -(-samples_in(batch) // self.microbatches))
        if self._spread is None:
            self._begin(step, batch, parts)
        spread = self._known
        if self._report.steps:
            spread.look = None
            spread.owners.refuse_averages()
        seeds = agreed_seeds(self._place, batch, len(parts))
        weights = spread.weights.of(batch, parts)
        hooked = [name for name, one in self._model.named_parameters() if post_accumulate_hooks(one)]
        if hooked and len(parts) > 1:
            raise PipelineError(
                f"{hooked[0]!r} has a hook that runs when a gradient has been accumulated, and would run once for each "
                "micro-batch: remove it, or use microbatches=1"
            )
        if self._frozen != self._flags():
            raise PipelineError(
                "parameters were frozen or thawed, or have joined, while training goes on: a pipeline's ranks have "
                "divided them by what was trained in the first batch. Do so before the fit"
            )
        for part in parts:
            self._know(spread, step, part)
        if spread.plan.micro_batches != len(parts):
            spread.use(spread.planner.plan(len(parts)))
        running = RunningStep(spread, step, parts, weights, seeds, divide_by, self._workers)
        buffers = None
        if len(parts) > 1 and not self._report.steps:
            buffers = ChangedBuffers(self._model)
            warn_of_gradient_hooks(self._model)
        random, kept = random_state(), spread.owners.keep_gradients()
        try:
            self._run(spread, running)
        except BaseException:
            spread.owners.put_back(kept)
            raise
        finally:
            set_random_state(random)
        spread.owners.sum_shared(kept)
        self._sums.begin(spread.late)
        self._sums.end()
        spread.owners.refuse_strays()
        if buffers is not None:
            buffers.warn()
        return running.results

    @property
    def loss_weights(self) -> LossWeights:
        """Weights of micro-batches' losses.

        Raises:
            RuntimeError: no batch has been seen yet.
        """
        return self._known.weights

    def take_first_look(self) -> FirstLook | None:
        """Take the outputs of the step for the first batch, whole and in parts; once, behind the first step."""
        look, self._known.look = self._known.look, None
        return look

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, steps without gradients run over the ranks; all ranks run the same ones, and get all values."""
        spread = self._spread
        if spread is None:
            return nullcontext()
        return self._gates.handled_by(spread.evaluation_broadcast(spread.evaluated))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all parameters are on all ranks; all ranks enter."""
        with ExitStack() as stack:
            if self._spread is not None:
                stack.enter_context(self._spread.owners.whole())
            elif self._hollow is not None:
                assert self._layers is not None
                for layer in self._layers.modules:
                    stack.enter_context(self._hollow.filled(layer, again=False))
            yield

    def outside_whole(self) -> AbstractContextManager[None]:
        """Inside, what lies in front of the layers and behind them is on all ranks."""
        return nullcontext() if self._spread is None else self._spread.owners.whole(self._spread.outside)

    def tell(self, what: Any) -> Any:
        """Share what the rank of the last stage gives with all ranks; all ranks call this."""
        return broadcast_object(what, self._known.plan.rank_of[-1], self._place.group)

    def total_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients of parameters on all ranks; all ranks call this."""
        owners = self.owners  # of parameters that several ranks have the first counts them
        counted = {parameter for name, parameter in owners.parameters.items() if owners.counts_state(name)}
        gradients = [p.grad for p in parameters if p in counted and p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._place.device)
        if gradients:
            square += nn.utils.get_total_norm(gradients).double().square()
        with messages_of_group(self._place.group):
            dist.all_reduce(square, group=self._place.group)
        types = {parameter.dtype for parameter in self._model.parameters()}
        return square.sqrt().to(torch.float64 if torch.float64 in types else torch.float32)

    def restore(self) -> None:
        """Give each rank the whole model back, but for one that began on the meta device; all ranks call this."""
        if self._spread is not None and self._hollow is None:
            self._spread.owners.fetch()
        self.remove()

    def remove(self) -> None:
        """Leave the model as it is: on each rank, its own stages."""
        self._gates.remove()
        self._workers.stop()
        self._sums.forget()
        if self._spread is not None:
            self._spread.split.remove()
            self._spread.owners.forget()
        self._spread = None

    def report(self) -> PipelineReport:
        """Report of what was done so far, on this rank."""
        if self._spread is not None:
            reasons = self._spread.split.layers_in_order.items()
            self._report.layers_in_order = {reason: count for reason, count in reasons if "first step" not in reason}
        return self._report

    def timeline(self) -> list[TimelineSpan] | None:
        """Tasks of all ranks of the pipeline in the last step, on its first; None on others. All ranks call this.

        Clocks are those of the machines: ranks on other machines begin at their own first task.
        """
        spans = self._report.spans
        everyone = gathered((platform.node(), spans), self._place.group)
        if everyone is None:
            return None
        begins: dict[str, float] = {}
        for node, some in everyone:
            begins[node] = min([begins.get(node, math.inf), *(one.start_s for one in some)])
        return [
            TimelineSpan(
                f"{one.kind}{one.stage + 1}@{one.micro_batch}",
                lane_name(rank),
                1000 * (one.start_s - begins[node]),
                1000 * (one.end_s - one.start_s),
                _WORDS[one.kind],
            )
            for rank, (node, some) in enumerate(everyone)
            for one in some
        ]

    def _stand_at(self, layers: LayerList) -> None:
        firsts = first_layers(self._split, layers, self._place.ranks, self._layers_per_stage)
        self._planner_of = partial(self._planner_of, split=firsts)
        self._layers, self._gates = layers, LayerInterceptors(layers.modules)
        self._place = replace(self._place, names=layers.names)

    def _begin(self, step: Callable[[Any], Any], batch: Any, parts: Sequence[Any]) -> None:
        with self._tried_out():
            layers = self._layers
            if layers is None:
                tensors = reachable_tensors(self._model, parts[0])
                with preserve_state(self._model, tensors=tensors), torch.enable_grad():
                    layers = call_chain(self._model, lambda: seeded(step, parts[0]), self._place.ranks)
                if self._path is None:
                    warn_of_no_list(self._model, layers, self._place.ranks)
                self._stand_at(layers)
            first = FirstBatch(self._model, layers, self._gates, self._place, self._workers, self._hollow)
            spread = self._spread = first.spread(step, batch, parts, self._planner_of, self._loss_weight)
        self._gates.around = None
        self._gates.handler = spread.training_call
        self._frozen = self._flags()
        self._report = PipelineReport(
            schedule=spread.plan.name,
            layers=layers.path,
            stages=spread.plan.stages,
            stages_here=tuple(spread.mine),
            parameter_bytes=spread.owners.bytes_by_rank[self._place.rank],
            parameter_bytes_by_rank=tuple(spread.owners.bytes_by_rank),
            parameter_bytes_of_all=spread.owners.bytes_of_all,
        )
        spread.owners.warn_of_shares(repr(self._split if isinstance(self._split, str) else list(self._split)))
        if self._is_asked and len(parts) < self.microbatches:
            warn_no_effect(
                f"microbatches={self.microbatches} has no effect for the first batch of {samples_in(batch)} samples, "
                f"which has {len(parts)} micro-batches of up to {samples_in(parts[0])}: use microbatches={len(parts)}, "
                "or larger batches"
            )

    @contextmanager
    def _tried_out(self) -> Iterator[None]:
        """Around runs of the step that train nothing, where torch's checkpoints warn of missing gradients."""
        with self._quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            yield

    def _know(self, spread: PipelineState, step: Callable[[Any], Any], part: Any) -> None:
        """Run micro-batches of new shapes once, as an evaluation and without a trace, to see shapes between layers."""
        key = shapes_of_batch(part)
        if (0, key) in spread.reads:
            return
        broadcast = spread.evaluation_broadcast(spread.outputs)
        with self.outside_whole():  # first, as what it fetches stays
            kept = preserve_state(self._model, tensors=reachable_tensors(self._model, part, parameters=False))
            with self._gates.handled_by(broadcast), kept, self._tried_out(), torch.no_grad():
                seeded(step, part)
        for stage in range(spread.plan.stages):
            given = broadcast.given[spread.plan.layers_of(stage)[0]]
            places, flags = spread.positions.get(stage, []), spread.needs_gradient.get(stage, [])
            spread.reads[stage, key] = [
                replace(given[number], requires_grad=flag) for number, flag in zip(places, flags, strict=True)
            ]

    def _run(self, spread: PipelineState, running: RunningStep) -> None:
        plan, place = spread.plan, self._place

        def done(stage: int) -> None:
            self._sums.begin(spread.stage_parameters[stage])

        waiting = plan.waiting
        stages = [
            Stage(stage, plan.rank_of, place.group, place.device, running, spread.split, waiting, done)
            for stage in spread.mine
        ]
        ahead = _ASK_AHEAD if dist.get_backend(place.group) == "gloo" else 0
        runtime = pipeline_runtime(stages, plan.micro_batches, plan.orders, spread.with_messages, ask_ahead=ahead)
        spread.with_messages = runtime.with_messages
        try:
            running.begin()
            with messages_of(lambda: _awaited(stages)):
                runtime.run()
        finally:
            running.close()
            for key in list(spread.split.passes.in_flight):
                spread.split.passes.drop(key)
        self._sums.end()
        self._report.note(stages, plan, place.rank)
        if place.device.type == "cpu" and plan.makespan_ms is not None and spread.times.note(self._report.spans):
            spread.plan_from_steps()  # tasks on other devices only begin when they are noted

    def _flags(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._model.parameters())


def _awaited(stages: Iterable[Stage]) -> str:
    """Rank whose message was asked for first and has not come."""
    waiting = [message for stage in stages for message in stage.awaited.values()]
    return min(waiting)[1] if waiting else "another rank"
