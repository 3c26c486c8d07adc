"""One batch on its way through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retime.foundations.parts import loss_of, samples_in
from retime.foundations.preserve_state import seed_all
from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.pipeline.losses import needed_loss
from retime.mechanisms.pipeline.spread import Spread
from retime.mechanisms.pipeline.suspended_call import Returned, SuspendedCall, Workers
from retime.mechanisms.pipeline.training_call import AtEdge
from retime.mechanisms.pipeline.values import TensorKind, shapes_of

__all__ = ["MicroBatchResult", "RunningStep", "whole_loss"]


@dataclass(frozen=True)
class MicroBatchResult:
    """What a step returned for one micro-batch; on the rank of the last stage only.

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
        spread: over which ranks.
        step: the training step.
        parts: micro-batches.
        weights: of their losses.
        seeds: of the micro-batches, the same on all ranks: what runs in front of the layers draws the same numbers
            everywhere, whatever the schedule.
        divide_by: of the losses, beside their weights.
        workers: for suspended calls.
    """

    def __init__(
        self,
        spread: Spread,
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
        self._keys = [shapes_of(part) for part in parts]
        self._calls = [_call(step, part, workers, seed) for part, seed in zip(parts, seeds, strict=True)]
        self._at: list[Any] = [None] * len(parts)
        self._results: dict[int, MicroBatchResult] = {}

    @property
    def results(self) -> list[MicroBatchResult]:
        """By micro-batch; empty on ranks without the last stage."""
        return [self._results[batch] for batch in sorted(self._results)]

    def begin(self) -> None:
        """Begin the first micro-batch's call on ranks that wait for a message before their first stage.

        What a step raises in front of its layers, it then raises on all ranks, and none waits for another.
        """
        mine = self._spread.mine
        if 0 not in mine:
            with self._spread.split.begin((min(mine), 0)):
                self._start(0)

    def reads(self, stage: int, batch: int) -> list[TensorKind]:
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
        spread.whole.splits = (stage, batch) in spread.plan.waiting
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
        weight = self._weights[batch] / self._divide_by
        return loss * weight if weight else loss.detach()  # a mean over nothing has no gradient either


def _call(step: Callable[[Any], Any], part: Any, workers: Workers, seed: int) -> SuspendedCall:
    return SuspendedCall(lambda: step(part), workers, seed)


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return {key: _detached(value) for key, value in output.items()} if isinstance(output, dict) else output
