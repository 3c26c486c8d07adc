"""A visitor of training steps that are cut: it stops at the edges of stages and goes past what lies elsewhere."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private import top_saved_tensors_hooks
from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.pipeline.plan import PipelinePlan
from retime.mechanisms.pipeline.survey import Shapes
from retime.mechanisms.pipeline.suspended_call import SuspendedCall, current_call
from retime.mechanisms.pipeline.values import ValueKind, leads_to, replaced_tensors, shapes_of, tensors_in_order

__all__ = ["AtEdge", "TrainingCall"]


@dataclass(frozen=True)
class AtEdge:
    """A step stands at the first layer of a stage.

    Attributes:
        stage: from 0, in front of which it stands.
        given: the tensors in the layer's arguments.
    """

    stage: int
    given: list[Tensor]


class TrainingCall:
    """What the layers do in a training step of one micro-batch.

    Args:
        plan: which layer runs where.
        rank: this one.
        device: of the model.
        outputs: kinds of what layers return, by layer and shapes of their arguments.
        names: of the layers, for errors.
        writes: layers that write into what they are given.

    Attributes:
        recomputes: the call whose backward pass runs, in which checkpoints run layers again.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        rank: int,
        device: torch.device,
        outputs: Mapping[tuple[int, Shapes], ValueKind],
        names: Sequence[str],
        writes: Container[int] = (),
    ) -> None:
        self._plan, self._rank, self._device, self._outputs, self._names = plan, rank, device, outputs, names
        self._firsts = {plan.layers_of(stage)[0]: stage for stage in range(plan.stages)}
        self._writes = writes
        self.recomputes: SuspendedCall | None = None
        self._mine = [plan.rank_of[stage] == rank for stage in plan.stage_of]

    def before(self, layer: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        stage = self._firsts.get(layer)
        if stage is None:
            return None
        if current_call() is None and self.recomputes is not None:
            return _replaced(args, kwargs, self.recomputes.received.get(layer, {}))
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
        return _replaced(args, kwargs, changed)

    def is_here(self, layer: int) -> bool:
        here = self._mine[layer]
        if here:
            self._call(layer).draw_for(layer)
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
        return output

    def _call(self, layer: int) -> SuspendedCall:
        call = current_call() or self.recomputes
        if call is None:
            raise PipelineError(
                f"{self._names[layer]!r} was called outside of the step: the model's layers lie on several ranks, and "
                "run in training_step, validation_step, test_step and predict_step only"
            )
        return call


def _replaced(args: Any, kwargs: Any, tensors: dict[int, Tensor]) -> tuple[Any, Any]:
    replaced: tuple[Any, Any] = replaced_tensors((args, kwargs), tensors)
    return replaced
