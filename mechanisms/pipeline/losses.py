"""How the loss of a batch comes from those of its micro-batches: by the operations of the first one, or as told."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retime.foundations.parts import (
    Certificate,
    Head,
    NotSeparableError,
    NotUnderstoodError,
    RecordedRun,
    Weighting,
    WeightsUnclearError,
    head_of,
    head_of_loss,
    loss_of,
    loss_weights,
    record,
    record_altered,
    samples_in,
    split_batch,
)
from retime.foundations.preserve_state import preserve_state, reachable_tensors, seed_all
from retime.foundations.torch_private.engine import reduction_of
from retime.mechanisms.pipeline.calls import LayerInterceptors
from retime.mechanisms.pipeline.checks import LayerResults, PipelineError

LossWeight = Literal["samples", "sum"] | Callable[[Any], Any]
"""What a step divides its sum by, as a user says: the number of samples, nothing, or what a function gives."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION = 3e-2
_FOLLOWED = 5
"""Samples of which operations are followed: one or two may take other operations, as they lie in memory otherwise."""
_WHAT_TO_DO = (
    "use a mean or a sum over samples or labels; or say what the step divides by, with loss_weight='samples', 'sum' or "
    "a function of the batch, such as loss_weight=lambda batch: (batch[1] > 0).sum().clamp(min=1); or use "
    "microbatches=1"
)


@dataclass(frozen=True)
class Examples:
    """Outputs of a step for the first batch, in evaluation mode.

    Attributes:
        whole: for all of it.
        parts: for its micro-batches.
        weights: of their losses.
        samples: in them.
    """

    whole: Any
    parts: list[Any]
    weights: list[float]
    samples: list[int]


@dataclass
class FirstLook:
    """Evidence of the first batch about its losses, until somebody has looked at it.

    Attributes:
        examples: as layers compute, and as they compute with noise in what they return, sample by sample; empty where
            losses of the same batch are not the same.
        runs: on a few samples and on fewer, with their operations; empty where these were not followed.
        altered: on a few samples, with other values where it reads those of samples; None where it cannot run on them.
        low_precision: layers compute in 16 bits.
    """

    examples: list[Examples] = field(default_factory=list)
    runs: tuple[RecordedRun, ...] = ()
    altered: list[RecordedRun | None] = field(default_factory=list)
    low_precision: bool = False

    def head_of(self, of: Callable[[Any], Any]) -> Head | None:
        """Head of a number, which says what it is of its samples; None where no operations lead to it.

        Args:
            of: the number in what a step returned.

        Raises:
            NotUnderstoodError: it is neither a mean nor a sum over samples or labels.
        """
        numbers = [of(run.output) for run in self.runs]
        if not numbers or not all(isinstance(number, Tensor) and number.numel() == 1 for number in numbers):
            return None
        (large, one), (small, two) = zip(self.runs, numbers, strict=True)
        if not large.recorder.operation_of(one).varies:
            return None
        return head_of((large, one), (small, two), (loss_of(large.output), loss_of(small.output)))


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses of a batch's micro-batches.

    Attributes:
        certificate: how losses add up, as operations tell; the same on all ranks.
        divisor: what the user says that the step divides by; None: nothing is said.
    """

    certificate: Certificate
    divisor: Callable[[Any], Any] | None = None

    @property
    def weightings(self) -> tuple[Weighting, ...]:
        """Weightings of losses, if they are told by the operations; all weigh the parts of a batch alike."""
        first = self.certificate.weighting
        return () if first is None or self.divisor is not None else (first, *self.certificate.alternatives)

    def of(self, batch: Any, parts: Sequence[Any]) -> list[float]:
        """The weight of each part of a batch.

        Raises:
            PipelineError: the first batch did not show by what these are weighed, or ``loss_weight`` gives no number.
        """
        if len(parts) == 1:
            return [1.0]
        if self.divisor is not None:
            whole = _divisor(self.divisor, batch, "the whole batch")
            if not whole:
                raise PipelineError("loss_weight=... gave 0 for a whole batch: what a step divides by is above 0")
            return [_divisor(self.divisor, part, "a micro-batch") / whole for part in parts]
        try:
            return loss_weights(self.certificate, parts, [samples_in(part) for part in parts])
        except (NotSeparableError, WeightsUnclearError, LookupError) as error:
            raise PipelineError(
                "micro-batches of this batch cannot be weighed as those of the first one, which is all that a pipeline "
                f"has seen whole ({error}): {_WHAT_TO_DO}"
            ) from error


def _divisor(loss_weight: Callable[[Any], Any], batch: Any, what: str) -> float:
    given = loss_weight(batch)
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if isinstance(given, str) or not math.isfinite(number) or number < 0:
        raise PipelineError(
            f"loss_weight=... gave {given!r} for {what}: it has to give a finite number above 0, what the step divides "
            "its sum by there, or 0 where a micro-batch has nothing to learn from"
        )
    return number


def look_at_losses(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    parts: Sequence[Any],
    *,
    loss_weight: LossWeight | None = None,
    gates: LayerInterceptors | None = None,
    names: Sequence[str] = (),
) -> tuple[LossWeights, FirstLook]:
    """Find by what weights a batch's loss is that of its parts: by samples, by labels counted in them, or as a sum.

    The operations behind the loss say which, unless the user does. Then the losses of this batch and of its parts are
    compared, as they are, and with noise in what each layer returns, sample by sample: there shows what is the same
    only because parts are alike. The model is in evaluation mode for this, so that dropout and batch statistics do not
    count. Nothing is kept for gradients, and all runs begin with the same random numbers.

    Raises:
        PipelineError: no such weights are known.
    """
    gates = LayerInterceptors([]) if gates is None else gates
    results = gates.handler = LayerResults(names)
    if loss_weight is not None:
        divisor = None if isinstance(loss_weight, str) else loss_weight
        weights = LossWeights(Certificate(Weighting("sum" if loss_weight == "sum" else "mean")), divisor)
        weights.of(batch, parts)  # whether it gives numbers
    if len(parts) == 1:
        if loss_weight is None:
            weights = LossWeights(Certificate(None, "the first batch had one micro-batch"))
        return weights, FirstLook()
    look, samples = FirstLook(), [samples_in(part) for part in parts]
    with evaluated(model):
        everything, again = _seen(results, step, batch, 0, sum(samples)), _run(step, batch, 1)
        if not _same(everything, again) and not _same(everything, _run(step, batch, 0)):
            raise PipelineError(
                "the loss of the same batch with the same random numbers changes from call to call: training_step "
                "keeps a state of its own, and a pipeline calls it once for each micro-batch. Change the state in "
                "a hook, such as on_train_batch_end"
            )
    try:
        # steps in training mode change buffers, as a spectral norm's
        with preserve_state(model, tensors=reachable_tensors(model, batch, parameters=False)):
            look.runs = _followed(step, batch, results)
            few = _few(batch)[0]
            look.altered = list(record_altered(lambda part: _run(step, part, 0), few, look.runs[0], results.tells))
        if loss_weight is None:
            large, small = look.runs
            head = head_of_loss(large, small, look.altered)
            first, *others = head.weightings or (Weighting("mean"),)
            if head.compares:  # with a number that may be another in a later step, which a pipeline would not see
                raise NotUnderstoodError(f"it is a {first}, which the step compares itself: pass a mask in the batch")
            weights = LossWeights(Certificate(first, alternatives=tuple(others)))
    except NotUnderstoodError as error:
        if loss_weight is None:
            raise PipelineError(
                f"how the losses of micro-batches add up to a batch's cannot be told from the loss: {error}. So that "
                f"nothing else is trained, {_WHAT_TO_DO}"
            ) from error
    finally:
        results.tells(None)
    if not _same(everything, again) or not _loss(everything).isfinite():
        return weights, look  # it draws random numbers, or has no value: there is nothing to compare
    each = weights.of(batch, parts)
    noises = ("added", "multiplied") if _loss(everything).device.type == "cpu" else ("multiplied", "bounded")
    for noise in (None, *noises):
        try:
            with evaluated(model):
                whole = _seen(results, step, batch, 0, sum(samples), noise) if noise else everything
                if noise and not _loss(whole).isfinite():
                    continue
                firsts = [sum(samples[:number]) for number in range(len(parts))]
                outputs = [_seen(results, step, *one, sum(samples), noise) for one in zip(parts, firsts, strict=True)]
        except PipelineError:
            raise
        except Exception:
            if noise is None:
                raise
            continue  # layers cannot give that, as probabilities above 1
        look.low_precision = results.low_precision
        near = _LOW_PRECISION if look.low_precision else _TOLERANCE.get(_loss(whole).dtype, _LOW_PRECISION)
        _compare(_loss(whole), [_loss(output) for output in outputs], each, near, loss_weight, bool(noise))
        look.examples.append(Examples(whole, outputs, each, samples))
        if noise or not results.can_have_noise:
            break
    return weights, look


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode, and nothing is kept for gradients."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _seen(
    results: LayerResults, step: Callable[[Any], Any], part: Any, first: int, whole: int, noise: str | None = None
) -> Any:
    """Run a step on samples of the first batch, of which the layers' handler is told."""
    with results.samples(first, samples_in(part), whole, noise):
        return _run(step, part, 0)


def _few(batch: Any) -> tuple[Any, Any]:
    """Some samples of a batch, and fewer."""
    few = split_batch(batch, _FOLLOWED)[0]
    samples = samples_in(few)
    return few, split_batch(few, samples // 2 + 1 if samples > 2 else 1)[0]


def _followed(step: Callable[[Any], Any], batch: Any, results: LayerResults) -> tuple[RecordedRun, RecordedRun]:
    """The operations of the step on some samples and on fewer."""
    try:
        large, small = (record(lambda part: _run(step, part, 0), few, results.tells) for few in _few(batch))
    except (NotUnderstoodError, PipelineError):
        raise
    except Exception as error:  # whatever a step says to being watched
        text = str(error).splitlines()[0] if str(error) else "no message"
        raise NotUnderstoodError(f"its operations cannot be followed ({type(error).__name__}: {text})") from error
    return large, small


def _compare(
    whole: Tensor, losses: Sequence[Tensor], weights: Sequence[float], near: float, loss_weight: Any, noise: bool
) -> None:
    """Raise where the weighted losses are not the batch's; those that count for nothing may have no value."""
    counted = [(weight, float(loss)) for weight, loss in zip(weights, losses, strict=True) if weight]
    scale = max([abs(weight * loss) for weight, loss in counted] + [abs(float(whole)), 1e-12])
    total = sum(weight * loss for weight, loss in counted)
    if abs(total - float(whole)) <= near * scale * math.sqrt(len(losses)):
        return
    where = "of layers whose outputs were changed at random, sample by sample," if noise else "of the first batch"
    by = "weighed by loss_weight=" if loss_weight is not None else "weighed by what the loss is a mean or a sum over"
    raise PipelineError(
        f"the loss {where} is {float(whole):.6g}, and those of its {len(losses)} micro-batches, {by}, add up to "
        f"{total:.6g}: samples of a batch influence one another, or the loss is not what it is taken for. So that "
        f"nothing else is trained, {_WHAT_TO_DO}"
    )


def _run(step: Callable[[Any], Any], part: Any, seed: int) -> Any:
    seed_all(seed)
    try:
        return step(part)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise PipelineError(
            "training_step differentiates by itself, which needs the layers of all ranks: a pipeline has no gradients "
            f"inside of a step ({error})"
        ) from error


def _same(one: Any, other: Any) -> bool:
    return torch.allclose(_loss(one), _loss(other), rtol=0, atol=0, equal_nan=True)


def needed_loss(output: Any) -> Tensor:
    """The loss in what a step returned.

    Raises:
        PipelineError: there is none.
    """
    try:
        return loss_of(output)
    except ValueError as error:
        raise PipelineError(
            f"training_step gave no loss for a micro-batch ({error}), and a pipeline cannot skip batches: return "
            "0 * loss in place of None"
        ) from error


def _loss(output: Any) -> Tensor:
    return needed_loss(output).detach()


_NODES_OF_A_LOSS = 64
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Expand", "Clone", "T", "Transpose", "Squeeze", "Unsqueeze")


def operations_of(loss: Tensor) -> Counter[str]:
    """Count the nodes that lead to a loss, by name and reduction; views, which follow from shapes, do not count."""
    names, waiting, seen = Counter[str](), deque([loss.grad_fn]), set[Any]()
    while waiting and len(seen) < _NODES_OF_A_LOSS:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, reduction = node.name().partition("Backward")[0], reduction_of(node)
        if name not in _VIEWS:
            names[name if reduction is None else f"{name} with reduction {reduction}"] += 1
        waiting += [following for following, _ in node.next_functions]
    return names
