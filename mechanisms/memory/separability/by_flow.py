"""What the losses of parts are weighed by, from the operations of a step alone: no gradient is computed.

For callers that compare losses by themselves and hold no more than a part's worth of a model. What the loss is divided
by is followed through the operations, so that it holds for batches of other values than were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.memory.batches import Count, Weighting, loss_of, replaced_tensors, samples_in
from retime.mechanisms.memory.separability.altered import ALTERATIONS, Altered
from retime.mechanisms.memory.separability.flow import Flow
from retime.mechanisms.memory.separability.flow_judge import FlowVerdict, judge_flow
from retime.mechanisms.memory.separability.watch import NoDropout, Watch

__all__ = ["WeightsByFlow", "weights_by_flow"]


@dataclass(frozen=True)
class WeightsByFlow:
    """How the losses of parts add up to the batch's, as far as operations tell.

    Attributes:
        needed: all of these have to weigh the parts of a batch alike, where there are several.
        complete: counts that have to count all entries there are, since the loss is a mean over some of those.
        reason: why batches of other values may need other weights; empty where they do not.
    """

    needed: tuple[Weighting, ...] = ()
    complete: tuple[Count, ...] = ()
    reason: str = ""


def weights_by_flow(step: Callable[[Any], Any], whole: Any, part: Any) -> WeightsByFlow:
    """Run a step on some samples and on fewer of them, and follow what flows into the loss.

    Nothing that autograd would save is kept. The caller sees to it that both runs begin alike, and that they leave no
    trace.

    Args:
        step: computes on a batch and returns the loss, or what has one.
        whole: two samples or more.
        part: its first samples.
    """
    try:
        loss, flow = _run(step, whole)
        _, fewer = _run(step, part)
        verdict = judge_flow(flow, fewer)
        depends = bool(verdict.read) and _depends(step, whole, verdict.read, loss, flow)
    except Exception as error:  # whatever a step says to being watched
        text = str(error).splitlines()[0] if str(error) else "no message"
        return WeightsByFlow(reason=f"its operations cannot be followed ({type(error).__name__}: {text})")
    flow.release()
    fewer.release()
    if verdict.reason:
        return WeightsByFlow(reason=verdict.reason)
    if depends:
        return WeightsByFlow(reason="it computes something else where values of the batch that it reads are others")
    return _in(verdict)


def _in(verdict: FlowVerdict) -> WeightsByFlow:
    unknown = sorted({place for by in verdict.divisors if by.count is None for place in by.places})
    if unknown:
        return WeightsByFlow(
            reason=f"it is a mean over something that follows from {', '.join(unknown)} and cannot be counted there"
        )
    counts = {by.count for by in verdict.divisors if by.count is not None and not by.some}
    complete = {by.count for by in verdict.divisors if by.count is not None and by.some}
    needed = [Weighting("count", count) for count in sorted(counts, key=str)]
    if verdict.means or complete:
        needed.append(Weighting("mean"))
    return WeightsByFlow(tuple(needed or [Weighting("sum")]), tuple(sorted(complete, key=str)))


def _run(step: Callable[[Any], Any], batch: Any, altered: Altered | None = None) -> tuple[Tensor, Flow]:
    names: Sequence[int] = range(samples_in(batch))
    batch = replaced_tensors(batch, torch.clone)  # parts are views, of which it is not known what they cover
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing),
        Watch(names, batch, altered) as watch,
        NoDropout(watch),
    ):
        loss = loss_of(step(batch))
        watch.flow.end(loss)
    return loss.detach(), watch.flow


def _nothing(_: Any) -> Any:
    """Of what autograd would keep."""


def _depends(step: Callable[[Any], Any], batch: Any, read: Sequence[int], loss: Tensor, flow: Flow) -> bool:
    """Whether the step computes something else, or cannot run, if it reads other values."""
    operations = [one.name for one in flow.towards_loss()]
    for how in ALTERATIONS:
        altered = Altered(set(read), max(read), how)
        try:
            other, found = _run(step, batch, altered)
        except Exception as error:
            if altered.checked(error):
                continue
            return True
        if not torch.equal(other, loss) or [one.name for one in found.towards_loss()] != operations:
            return True
    return False
