"""Steps without a backward pass: all ranks run them, and each layer runs where it lies and sends on what it gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retime.mechanisms.pipeline.errors import messages_of_group
from retime.mechanisms.pipeline.plan import PipelinePlan
from retime.mechanisms.pipeline.survey import Shapes
from retime.mechanisms.pipeline.values import TensorKind, ValueKind, kind_of, shapes_of, tensors_in_order

__all__ = ["Relay"]


class Relay:
    """A visitor under which a step's values are there on all ranks, the layers' parameters only on their own.

    Args:
        plan: which layer runs where.
        group: the ranks of the pipeline.
        device: of the model.
        outputs: kinds of what layers return, by layer and shapes of their arguments; new ones are added.
    """

    def __init__(
        self, plan: PipelinePlan, group: Any, device: torch.device, outputs: dict[tuple[int, Shapes], ValueKind]
    ) -> None:
        self._plan, self._group, self._device, self._outputs = plan, group, device, outputs
        self._rank = dist.get_rank(group)
        self._shapes: Shapes = ()
        self.given: dict[int, list[TensorKind]] = {}
        """Kinds of the tensors in the arguments of each layer, in the last step."""

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        self._shapes = shapes_of((args, kwargs))
        self.given[layer] = [TensorKind.of(tensor) for tensor in tensors_in_order((args, kwargs))]

    def is_here(self, layer: int) -> bool:
        return self._plan.rank_of[self._plan.stage_of[layer]] == self._rank

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        key = layer, self._shapes
        if key not in self._outputs:
            self._outputs[key] = self._told(layer, None)
        kind = self._outputs[key]
        tensors = [one.empty(self._device) for one in kind.tensors]
        for tensor in tensors:
            self._broadcast(tensor, layer)
        return kind.with_tensors(tensors)

    def after(self, layer: int, output: Any) -> Any:
        key = layer, self._shapes
        if key not in self._outputs:
            self._outputs[key] = self._told(layer, kind_of(output))
        for tensor in tensors_in_order(output):
            self._broadcast(tensor.detach().contiguous(), layer)
        return output

    def _told(self, layer: int, kind: ValueKind | None) -> ValueKind:
        told = [kind]
        with messages_of_group(self._group):
            dist.broadcast_object_list(told, self._source(layer), group=self._group)
        assert told[0] is not None
        return told[0]

    def _broadcast(self, tensor: Tensor, layer: int) -> None:
        with messages_of_group(self._group):
            dist.broadcast(tensor, self._source(layer), group=self._group)

    def _source(self, layer: int) -> int:
        return dist.get_global_rank(self._group, self._plan.rank_of[self._plan.stage_of[layer]])
