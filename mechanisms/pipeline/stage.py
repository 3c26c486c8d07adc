"""One stage of a pipeline on its rank, as the runtime of ``torch.distributed.pipelining`` drives it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.weight_gradients import SplitBackward

if TYPE_CHECKING:
    from retime.mechanisms.pipeline.running import RunningStep


@dataclass(frozen=True)
class Span:
    """Task that ran, and its time.

    Attributes:
        kind: F, O, W, or B for both gradients.
        stage: from 0.
        micro_batch: from 0.
        start_s, end_s: on this rank's clock.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass
class _InFlight:
    """Tensors that a stage keeps of one micro-batch."""

    received: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class Stage:
    """Runs a stretch of the step forward and backward; its messages go to the stages beside it.

    Args:
        index: from 0.
        rank_of: the rank of each stage.
        step: runs the stretch for a micro-batch.
        waiting: stages and micro-batches whose weight gradients wait.
        done: called when all weight gradients of the stage are there.
    """

    has_backward = True

    def __init__(
        self,
        index: int,
        rank_of: Sequence[int],
        group: Any,
        device: torch.device,
        step: RunningStep,
        split: SplitBackward,
        waiting: Container[tuple[int, int]],
        done: Callable[[int], None],
    ) -> None:
        self.stage_index, self.num_stages = index, len(rank_of)
        self.group_rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.stage_index_to_group_rank = dict(enumerate(rank_of))
        self.is_first, self.is_last = index == 0, index == len(rank_of) - 1
        self.submod = nn.Module()
        self.output_chunks: list[Any] = []
        self.spans: list[Span] = []
        self.awaited: dict[tuple[str, int], tuple[float, str]] = {}
        """Messages that were asked for and not read yet, with when and whose: for errors."""
        self._group, self._device = group, device
        self._step, self._split, self._waiting, self._done = step, split, waiting, done
        self._reads = step.reads
        self._in_flight: defaultdict[int, _InFlight] = defaultdict(_InFlight)

    def get_fwd_recv_ops(self, batch: int) -> list[dist.P2POp]:
        """Messages of the stage before."""
        one = self._in_flight[batch]
        one.received = [kind.empty(self._device) for kind in self._reads(self.stage_index, batch)]
        self.awaited["F", batch] = time.perf_counter(), self._peer(-1)
        return self._messages(dist.irecv, one.received, -1)

    def get_fwd_send_ops(self, batch: int) -> list[dist.P2POp]:
        """Messages to the stage behind."""
        return self._messages(dist.isend, [t.detach().contiguous() for t in self._in_flight[batch].outputs], 1)

    def release_fwd_send_outputs(self, batch: int) -> None:
        """They are sent (torch 2.15 and newer): the backward pass needs them all the same."""

    def get_bwd_recv_ops(self, batch: int) -> list[dist.P2POp]:
        """Gradients from the stage behind."""
        one = self._in_flight[batch]
        kinds = [kind for kind in self._reads(self.stage_index + 1, batch) if kind.requires_grad]
        one.gradients = [kind.empty(self._device) for kind in kinds]
        self.awaited["O", batch] = time.perf_counter(), self._peer(1)
        return self._messages(dist.irecv, one.gradients, 1)

    def get_bwd_send_ops(self, batch: int) -> list[dist.P2POp]:
        """Gradients for the stage before."""
        return self._messages(dist.isend, self._input_gradients(batch), -1)

    def set_local_fwd_input(self, outputs: list[Tensor], batch: int) -> None:
        """The stage before is on this rank."""
        self._in_flight[batch].received = [tensor.detach() for tensor in outputs]

    def get_local_bwd_output(self, batch: int) -> list[Tensor]:
        """Return the gradients for a stage before that is on this rank."""
        return self._input_gradients(batch)

    def set_local_bwd_input(self, gradients: list[Tensor], batch: int) -> None:
        """The stage behind is on this rank."""
        self._in_flight[batch].gradients = gradients

    def forward_one_chunk(
        self, batch: int, args: Any = None, kwargs: Any = None, save_forward_output: bool = True
    ) -> list[Tensor]:
        """F."""
        start = time.perf_counter()
        self.awaited.pop(("F", batch), None)
        one = self._in_flight[batch]
        kinds = [] if self.is_first else self._reads(self.stage_index, batch)
        for tensor, kind in zip(one.received, kinds, strict=True):
            tensor.requires_grad_(kind.requires_grad)
        key = self.stage_index, batch
        with self._split.passes.begin(key, waits=key in self._waiting):
            one.outputs, one.inputs = self._step.forward(self.stage_index, batch, one.received)
        one.received = []
        self._note("F", batch, start)
        return one.outputs

    def backward_one_chunk(
        self, batch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """O, or both gradients."""
        start = time.perf_counter()
        self.awaited.pop(("O", batch), None)
        one = self._in_flight[batch]
        roots: list[Tensor] = one.outputs
        gradients: list[Any] = [None]
        if not self.is_last:
            kinds = self._reads(self.stage_index + 1, batch)
            roots = [tensor for tensor, kind in zip(one.outputs, kinds, strict=True) if kind.requires_grad]
            gradients = one.gradients
        pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root.requires_grad]
        if pairs:  # with a graph to go back through
            with self._step.backward(self.stage_index, batch):
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        one.outputs, one.gradients, one.received = [], [], []
        del roots, gradients, pairs
        if full_backward:
            self._finish(batch)
            self._note("B", batch, start)
            if last_backward:
                self._done(self.stage_index)
        else:
            self._note("O", batch, start)

    def backward_weight_one_chunk(self, batch: int, last_backward: bool = False) -> None:
        """W."""
        start = time.perf_counter()
        self._finish(batch)
        self._note("W", batch, start)
        if last_backward:
            self._done(self.stage_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Data parallel ranks are told by ``done``."""

    def _finish(self, batch: int) -> None:
        key = (self.stage_index, batch)
        if key in self._split.passes.in_flight:
            with self._step.backward(*key):
                self._split.passes.finish_together(key)

    def _input_gradients(self, batch: int) -> list[Tensor]:
        """Return the gradients of all inputs that need one; zeros where nothing of the loss came back."""
        one = self._in_flight[batch]
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            for tensor in one.inputs
            if tensor.requires_grad
        ]
        one.inputs = []
        return gradients

    def _messages(self, operation: Any, tensors: list[Tensor], step: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[self.stage_index + step]
        return [dist.P2POp(operation, tensor, group=self._group, group_peer=peer) for tensor in tensors]

    def _peer(self, step: int) -> str:
        peer = self.stage_index_to_group_rank[self.stage_index + step]
        return f"rank {dist.get_global_rank(self._group, peer)} (stage {self.stage_index + step + 1})"

    def _note(self, kind: str, batch: int, start: float) -> None:
        self.spans.append(Span(kind, self.stage_index, batch, start, time.perf_counter()))


# How long the tasks of a pipeline really take: seen in its first steps, for an order that fits them better.

_FIRST, _LAST = 2, 4
"""The steps that count, from 1: in the first one libraries and memory are cold."""


class MeasuredTimes:
    """Collects the tasks of a rank's first steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._took_ms: dict[tuple[int, str], list[float]] = {}

    def note(self, spans: Iterable[Span]) -> bool:
        """A step has run; whether it was the last that counts."""
        self._steps += 1
        if _FIRST <= self._steps <= _LAST:
            for span in spans:
                self._took_ms.setdefault((span.stage, span.kind), []).append(1000 * (span.end_s - span.start_s))
        return self._steps == _LAST

    def by_stage(self, weight_share: Mapping[int, float]) -> dict[int, tuple[float, float, float]]:
        """Milliseconds of F, O and W of each stage, the medians.

        Args:
            weight_share: of W in O and W together, by stage: for those that ran both in one pass.
        """
        times = {}
        for stage in {stage for stage, _ in self._took_ms}:
            took = {kind: median(values) for (one, kind), values in self._took_ms.items() if one == stage}
            if "O" not in took or "W" not in took:
                took["W"] = weight_share[stage] * took["B"]
                took["O"] = took["B"] - took["W"]
            times[stage] = took["F"], took["O"], took["W"]
        return times
