"""One batch on its way through a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.messages import warn_difference
from retime.foundations.parts import loss_of, samples_in
from retime.foundations.preserve_state import seed_all
from retime.foundations.torch_private.engine import top_saved_tensors_hooks, tree_leaves, tree_map
from retime.foundations.weight_gradients import SplitBackward
from retime.mechanisms.pipeline.calls import (
    HERE,
    LayerHandler,
    Returned,
    SuspendedCall,
    TensorSpec,
    ValueSpec,
    Workers,
    draw_for,
    leads_to,
    replaced_tensors,
    shapes_of,
    shapes_of_batch,
    spec_of,
    tensors_in_order,
)
from retime.mechanisms.pipeline.checks import PipelineError, all_gather_object, broadcast, broadcast_object
from retime.mechanisms.pipeline.layers import Shapes
from retime.mechanisms.pipeline.losses import FirstLook, LossWeights, needed_loss, operations_of
from retime.mechanisms.pipeline.ownership import Ownership
from retime.mechanisms.pipeline.plan import PipelinePlan, Planner
from retime.mechanisms.pipeline.stage import MeasuredTimes

# A handler of training steps that are cut: it stops at the edges of stages and goes past what lies elsewhere.


@dataclass(frozen=True)
class AtEdge:
    """A step stands at the first layer of a stage.

    Attributes:
        stage: from 0, in front of which it stands.
        given: the tensors in the layer's arguments.
    """

    stage: int
    given: list[Tensor]


class TrainingCall(LayerHandler):
    """Handler of the layers in a training step of one micro-batch.

    Args:
        plan: which layer runs where.
        outputs: kinds of what layers return, by layer and shapes of their arguments.
        writes: layers that write into what they are given.

    Attributes:
        recomputes: the call whose backward pass runs, in which checkpoints run layers again.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        place: RankInfo,
        outputs: Mapping[tuple[int, Shapes], ValueSpec],
        writes: Container[int],
    ) -> None:
        self._device, self._outputs, self._names, rank = place.device, outputs, place.names, place.rank
        self._firsts = {plan.layers_of(stage)[0]: stage for stage in range(plan.stages)}
        self._writes = writes
        self.recomputes: SuspendedCall | None = None
        self._mine = [plan.rank_of[stage] == rank for stage in plan.stage_of]

    def before(self, layer: int, args: Any, kwargs: Any) -> Any:
        stage = self._firsts.get(layer)
        if stage is None:
            return None
        if HERE.call is None and self.recomputes is not None:
            return replaced_tensors((args, kwargs), self.recomputes.received.get(layer, {}))
        here = self._mine[layer]
        comes_from_here = layer > 0 and self._mine[layer - 1]
        if not here and not comes_from_here:
            return None
        call = self._call(layer)
        given = tensors_in_order((args, kwargs))
        # what is sent is a copy: code between the layers may go on to write into it; what is given twice is sent once
        copies = {id(one): one.clone() for one in given} if comes_from_here else {id(one): one for one in given}
        sent = call.stop(AtEdge(stage, [copies[id(one)] for one in given]))
        if not here or not sent:
            return None
        # in place where that can be: code between the layers may use it beside the layer (a residual connection)
        inputs = {
            place: leads_to(given[place], one, has_backward=comes_from_here, written=layer in self._writes)
            for place, one in sent.items()
        }
        call.leaves = [leaf for _, leaf in inputs.values()]
        changed = {
            number: one
            for number, tensor in enumerate(given)
            for place, (one, _) in inputs.items()
            if tensor is given[place]
        }  # a layer may take the same tensor twice
        if top_saved_tensors_hooks(True) is not None:
            call.received[layer] = changed
        return replaced_tensors((args, kwargs), changed)

    def is_here(self, layer: int) -> bool:
        here = self._mine[layer]
        if here:
            draw_for(layer, self._call(layer).seed)
        return here

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        self._call(layer)
        kind = self._outputs.get((layer, shapes_of((args, kwargs))))
        if kind is None:
            raise PipelineError(
                f"{self._names[layer]!r} was called with tensors of shapes that it never had in a batch of this shape: "
                "what goes between the layers may depend on the batch's shape only, or use microbatches=1 without a "
                "pipeline"
            )
        return kind.stand_in(self._device)

    def after(self, layer: int, output: Any) -> Any:
        refuse_new_numbers(layer, output, self._outputs, self._names)
        return output

    def _call(self, layer: int) -> SuspendedCall:
        call = HERE.call or self.recomputes
        if call is None:
            raise PipelineError(
                f"{self._names[layer]!r} was called outside of the step: the model's layers lie on several ranks, and "
                "run in training_step, validation_step, test_step and predict_step only"
            )
        return call


def refuse_new_numbers(
    layer: int, output: Any, outputs: Mapping[tuple[int, Shapes], ValueSpec], names: Sequence[str]
) -> None:
    """Raise PipelineError if a layer returns numbers or texts that it never returned: ranks are sent tensors only."""
    numbers = [] if isinstance(output, Tensor) else _numbers_in(output)
    if numbers and all(_numbers_in(one.value) != numbers for (other, _), one in outputs.items() if other == layer):
        raise PipelineError(
            f"{names[layer]!r} returns numbers or texts that change ({', '.join(map(repr, numbers))} now), and ranks "
            "are sent tensors only: let it return a tensor, or let layers read the number from the module"
        )


def _numbers_in(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, bool | int | float | str)]


# Steps without a backward pass: all ranks run them, and each layer runs where it lies and sends on what it gives.


class EvaluationBroadcast(LayerHandler):
    """A handler under which a step's values are there on all ranks, the layers' parameters only on their own.

    Args:
        plan: which layer runs where.
        group: the ranks of the pipeline.
        outputs: kinds of what layers return, by layer and shapes of their arguments; new ones are added.
    """

    def __init__(self, plan: PipelinePlan, place: RankInfo, outputs: dict[tuple[int, Shapes], ValueSpec]) -> None:
        self._plan, self._outputs, self._names = plan, outputs, place.names
        self._group, self._device, self._rank = place.group, place.device, place.rank
        self._shapes: Shapes = ()
        self.given: dict[int, list[TensorSpec]] = {}
        """Kinds of the tensors in the arguments of each layer, in the last step."""

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        self._shapes = shapes_of((args, kwargs))
        self.given[layer] = [TensorSpec.of(tensor) for tensor in tensors_in_order((args, kwargs))]

    def is_here(self, layer: int) -> bool:
        return self._rank_of(layer) == self._rank

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        def received(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            tensor = leaf.empty(self._device)
            broadcast(tensor, self._rank_of(layer), self._group)
            return tensor

        return tree_map(received, self._spec(layer, None).value)

    def after(self, layer: int, output: Any) -> Any:
        self._spec(layer, output)
        refuse_new_numbers(layer, output, self._outputs, self._names)
        for tensor in tensors_in_order(output):
            broadcast(tensor.detach().contiguous(), self._rank, self._group)
        return output

    def _spec(self, layer: int, output: Any) -> ValueSpec:
        """Kinds of what a layer returns, by its rank; written into between the layers as those of other shapes are."""
        key = layer, self._shapes
        if key not in self._outputs:
            known = [one.tensors for (other, _), one in self._outputs.items() if other == layer]
            written = {number for tensors in known for number, tensor in enumerate(tensors) if tensor.written}
            spec: ValueSpec = broadcast_object(spec_of(output), self._rank_of(layer), self._group)
            self._outputs[key] = spec.with_written(written)
        return self._outputs[key]

    def _rank_of(self, layer: int) -> int:
        return self._plan.rank_of[self._plan.stage_of[layer]]


# A model that is spread over ranks: what one rank knows of it after the first batch.


@dataclass(frozen=True)
class RankInfo:
    """Position of this process among the ranks.

    Attributes:
        group: the ranks of the pipeline.
        data_group: the ranks with the same stages in other pipelines; None: there are none.
    """

    group: Any
    data_group: Any
    device: torch.device
    names: list[str]

    @property
    def rank(self) -> int:
        """Return the rank within the pipeline group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Return the size of the pipeline group."""
        return dist.get_world_size(self.group)

    def agreed(self, mine: Any) -> Any:
        """Share what the first rank of the first pipeline gives with all ranks of all pipelines."""
        if self.data_group is not None and self.rank == 0:
            mine = broadcast_object(mine, 0, self.data_group)
        return broadcast_object(mine, 0, self.group)


class StepModule(nn.Module):
    """Runs a stretch of a step, as if it were a module's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, stretch: Callable[[], Any]) -> Any:
        """Run a stretch of the step as the module's forward pass."""
        return stretch()


@dataclass
class PipelineState:
    """State of the pipeline, as the first batch has shown it.

    Attributes:
        planner: for other numbers of micro-batches.
        plan: the one in use.
        whole: runs stretches of a step for ``split``.
        split: of this rank's stages.
        weights: of micro-batches' losses.
        outputs: kinds of what layers return in training, by layer and shapes of their arguments.
        evaluated: of what they return in evaluation.
        positions: by stage, which tensors of its first layer's arguments come from the stage before.
        needs_gradient: of those.
        writes: layers that write into what they are given.
        reads: kinds of those, by stage and shapes of a micro-batch.
        stage_parameters: by stage, the trainable parameters that only it uses.
        late: this rank's parameters that several stages use.
        is_finite: the loss was, where all layers were on each rank.
        loss_operations: that lead to the loss of the first micro-batch, on the rank of the last stage.
        has_warned: of others.
        outside: names of the parameters in front of the layers and behind them.
        look: what the first batch has shown of its losses, until somebody has looked at it.
        with_messages: the plan's orders with all messages, as the runtime found them.
    """

    place: RankInfo
    planner: Planner
    plan: PipelinePlan
    whole: StepModule
    split: SplitBackward
    owners: Ownership
    weights: LossWeights
    outputs: dict[tuple[int, Shapes], ValueSpec]
    positions: dict[int, list[int]]
    needs_gradient: dict[int, list[bool]]
    writes: set[int]
    evaluated: dict[tuple[int, Shapes], ValueSpec] = field(default_factory=dict)
    reads: dict[tuple[int, Shapes], list[TensorSpec]] = field(default_factory=dict)
    stage_parameters: dict[int, list[Tensor]] = field(default_factory=dict)
    late: list[Tensor] = field(default_factory=list)
    is_finite: bool = True
    loss_operations: Counter[str] | None = None
    has_warned: bool = False
    outside: list[str] = field(default_factory=list)
    look: FirstLook | None = None
    with_messages: Any = None
    times: MeasuredTimes = field(default_factory=MeasuredTimes)

    def use(self, plan: PipelinePlan) -> None:
        """Another one, of as many stages."""
        self.plan, self.with_messages = plan, None

    def plan_from_steps(self) -> None:
        """Order the tasks anew, by what they took in the steps so far; all ranks call this."""
        shares = {stage: self.planner.weight_share(stage) for stage in self.mine}
        everyone = all_gather_object(self.times.by_stage(shares), self.place.group)
        self.planner.know(self.place.agreed({stage: took for one in everyone for stage, took in one.items()}))
        self.use(self.planner.plan(self.plan.micro_batches))

    @property
    def mine(self) -> list[int]:
        """This rank's stages."""
        return [stage for stage, rank in enumerate(self.plan.rank_of) if rank == self.place.rank]

    @cached_property
    def training_call(self) -> TrainingCall:
        """The layers of training steps."""
        return TrainingCall(self.plan, self.place, self.outputs, self.writes)

    def evaluation_broadcast(self, outputs: dict[tuple[int, Shapes], ValueSpec]) -> EvaluationBroadcast:
        """The layers of steps without gradients, by the kinds of what they return in evaluation or in training."""
        return EvaluationBroadcast(self.plan, self.place, outputs)


@dataclass(frozen=True)
class MicroBatchResult:
    """Result of a step for one micro-batch; on the rank of the last stage only.

    Attributes:
        output: of the step, without its graph.
        weight: of its loss in the batch's.
        samples: in it.
    """

    output: Any
    weight: float
    samples: int


def whole_loss(results: Sequence[MicroBatchResult]) -> Tensor:
    """The loss of a batch, a scalar in float64: that of its micro-batches, but for those that count for nothing."""
    return torch.stack([one.weight * loss_of(one.output).detach().double() for one in results if one.weight]).sum()


class RunningStep:
    """The micro-batches' calls of the training step on this rank, each as far as its stages have come.

    Args:
        seeds: of the micro-batches, the same on all ranks: what runs in front of the layers draws the same numbers
            everywhere, whatever the schedule.
        divide_by: of the losses, beside their weights.
    """

    def __init__(
        self,
        spread: PipelineState,
        step: Callable[[Any], Any],
        parts: Sequence[Any],
        weights: Sequence[float],
        seeds: Sequence[int],
        divide_by: int,
        workers: Workers,
    ) -> None:
        self._spread, self._seeds, self._divide_by = spread, seeds, divide_by
        self._weights = weights
        self._samples = [samples_in(part) for part in parts]
        self._keys = [shapes_of_batch(part) for part in parts]
        self._calls = [
            SuspendedCall(partial(step, part), workers, seed) for part, seed in zip(parts, seeds, strict=True)
        ]
        self._at: list[Any] = [None] * len(parts)
        self._results: dict[int, MicroBatchResult] = {}

    @property
    def results(self) -> list[MicroBatchResult]:
        """Return the results by micro-batch; empty on ranks without the last stage."""
        return [self._results[batch] for batch in sorted(self._results)]

    def begin(self) -> None:
        """Begin the first micro-batch's call on ranks that wait for a message before their first stage.

        What a step raises in front of its layers, it then raises on all ranks, and none waits for another.
        """
        mine = self._spread.mine
        if 0 not in mine:
            with self._spread.split.passes.begin((min(mine), 0)):
                self._start(0)

    def reads(self, stage: int, batch: int) -> list[TensorSpec]:
        """Kinds of what a stage reads of the one before."""
        return self._spread.reads[stage, self._keys[batch]]

    def forward(self, stage: int, batch: int, received: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the step of a micro-batch through a stage.

        Returns:
            What the next stage reads, or the weighted loss; and what ``received`` became in the step, to which its
            gradients go.
        """
        spread, call = self._spread, self._calls[batch]
        self._start(batch)
        answer = self._at[batch]
        while isinstance(answer, AtEdge) and answer.stage != stage:
            answer = call.resume()
        if not isinstance(answer, AtEdge):
            first = spread.place.names[spread.plan.layers_of(stage)[0]]
            raise PipelineError(
                f"training_step did not come to {first!r}, as it did in the first batch: a pipeline needs each layer "
                "once in every micro-batch"
            )
        sent = dict(zip(spread.positions.get(stage, []), received, strict=True))
        call.leaves = []
        answer = self._at[batch] = spread.whole(lambda: call.resume(sent))
        if isinstance(answer, Returned):
            return [self._weighted(batch, answer.value)], call.leaves
        return [answer.given[number] for number in spread.positions[stage + 1]], call.leaves

    @contextmanager
    def backward(self, stage: int, batch: int) -> Iterator[None]:
        """Inside, layers that checkpoints run again belong to this micro-batch."""
        training, call = self._spread.training_call, self._calls[batch]
        training.recomputes = call
        try:
            yield
        finally:
            training.recomputes = None
            call.received.pop(self._spread.plan.layers_of(stage)[0], None)

    def close(self) -> None:
        """End what is left of the calls."""
        for call in self._calls:
            call.close()

    def _start(self, batch: int) -> None:
        if self._at[batch] is None:
            seed_all(self._seeds[batch])
            self._at[batch] = self._calls[batch].resume()

    def _weighted(self, batch: int, output: Any) -> Tensor:
        loss = needed_loss(output)
        if not self._weights[batch] and loss.detach().isfinite() and loss.detach():
            raise PipelineError(
                f"loss_weight=... gave 0 for a micro-batch whose loss is {float(loss.detach()):.6g}, so the step "
                "divides by something else there: give the same number, such as a count with .clamp(min=1)"
            )
        self._results[batch] = MicroBatchResult(_detached(output), self._weights[batch], self._samples[batch])
        self._look_at_operations(loss)
        weight = self._weights[batch] / self._divide_by
        return loss * weight if weight else loss.detach()  # a mean over nothing has no gradient either

    def _look_at_operations(self, loss: Tensor) -> None:
        """Say once where a loss is computed by other operations than in the first batch, which alone was examined."""
        spread = self._spread
        if spread.loss_operations is not None and len(self._weights) == 1:
            return
        now = operations_of(loss)
        if spread.loss_operations is None:
            spread.loss_operations = now
            if spread.is_finite and not loss.detach().isfinite():
                raise PipelineError(
                    f"the loss is {float(loss.detach())} in the first step, and was finite where all layers were on "
                    "each rank: the step reads weights of layers that lie on other ranks, such as a frozen weight in "
                    "F.linear(x, self.net[0].weight). Keep a copy of it outside of the layers"
                )
        elif loss.requires_grad and now != spread.loss_operations and not spread.has_warned:
            spread.has_warned = True
            changed = sorted(str(name) for name in {**(now - spread.loss_operations), **(spread.loss_operations - now)})
            warn_difference(
                "training_step computes its loss by other operations than in the first batch "
                f"({', '.join(changed)}), and a pipeline has looked at that one only: a loss that is another mean or "
                "sum, or mixes samples by now, trains otherwise than on one device. Use microbatches=1, or begin with "
                "all terms",
                every_rank=True,
            )


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return {key: _detached(value) for key, value in output.items()} if isinstance(output, dict) else output
