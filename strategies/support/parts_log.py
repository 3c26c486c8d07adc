"""What `training_step` logs for parts of a batch, sub-batches or micro-batches, is put together and logged once.

A batch's number is a weighted sum of its parts' numbers: by the loss's weights, by samples, as a plain sum, or by the
``batch_size`` that each part gave; or their maximum or minimum, where ``reduce_fx`` says so. Which of them holds is
seen where the same samples ran whole and in parts: in the examples of a budget's certificate, and in the first batch of
a pipeline.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from retime.foundations.messages import warn_difference
from retime.foundations.parts import Certificate, Example, NotUnderstoodError, combined_scalar, loss_of, normalised
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.memory_budget import SubBatches
from retime.mechanisms.pipeline import Examples, FirstLook, LossWeights
from retime.strategies.support.lightning_private import logging_as, metric_state, set_metric_state
from retime.strategies.support.metric_calls import MetricCall, MetricCalls

LOGGED = "logged"
"""Under this key a step returns what it logged, so that examples of whole batches and of parts have it."""

By: TypeAlias = Literal["weights", "batch_size", "samples", "sum", "max", "min"]

_LOG = inspect.signature(LightningModule.log)
_EXTREMES: tuple[By, ...] = ("max", "min")
_REDUCED: dict[str, By] = {"sum": "sum", "max": "max", "min": "min"}
_TEXTS: dict[By, str] = {
    "weights": "the mean over {them}, weighted by samples or as the loss",
    "samples": "the mean over {them}, weighted by samples",
    "batch_size": "the mean over {them}, weighted by the batch_size that each gave",
    "sum": "the sum over {them}, as its reduce_fx says",
    "max": "the maximum over {them}, as its reduce_fx says",
    "min": "the minimum over {them}, as its reduce_fx says",
}


@dataclass
class LoggedCall:
    """One call of ``log`` in ``training_step``.

    Attributes:
        count: how often the same part logged that name before.
        value: as it was then.
        size: the ``batch_size``; None where Lightning is to look at the batch.
        sized: a ``batch_size`` is given.
    """

    name: str
    count: int = 0
    value: Any = None
    size: Any = None
    sized: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name if not self.count else f"{self.name} (call {self.count + 1})"

    @property
    def size_key(self) -> str:
        return f"batch_size of {self.key}"

    @property
    def reduced(self) -> By | None:
        """Reduction of an epoch's values, where not to a mean."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        return _REDUCED.get((reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")).lower())

    @property
    def assumed(self) -> By:
        """Way in which numbers add up that no example tells of."""
        return self.reduced or ("batch_size" if self.sized else "samples")


Calls: TypeAlias = dict[str, LoggedCall]
"""What one part logs, by key."""
Number: TypeAlias = Mapping[int, LoggedCall]
"""The calls with one key, by part."""


def record(module: LightningModule, calls: Calls, name: str, value: Any, *arguments: Any, **options: Any) -> LoggedCall:
    """Note a call of ``log`` among those of the same part."""
    given = _LOG.bind(module, name, value, *arguments, **options).arguments
    size = _copied(given.get("batch_size"))
    options = {key: given[key] for key in given if key not in ("self", "name", "value", "batch_size")}
    count = sum(call.name == name for call in calls.values())
    call = LoggedCall(name, count, _copied(value), size, size is not None, options)
    calls[call.key] = call
    return call


def numbers_of(parts: Sequence[Calls]) -> dict[str, dict[int, LoggedCall]]:
    """Numbers that parts log, by key and part."""
    numbers: dict[str, dict[int, LoggedCall]] = {}
    for part, calls in enumerate(parts):
        for key, call in calls.items():
            numbers.setdefault(key, {})[part] = call
    return numbers


def whole_number(by: By, number: Number, batch: SubBatches | Example | Examples) -> tuple[Any, bool]:
    """The whole batch's value, as :func:`shares` has its weights, and whether these are all there is to add."""
    values = [call.value for call in number.values()]
    sizes = [float(call.size) if call.sized else 0.0 for call in number.values()] if by == "batch_size" else []
    weights, complete = shares(by, batch, list(number), sizes)
    return _extreme(values, by) if by in _EXTREMES else combined_scalar(values, weights), complete


def shares(
    by: By, batch: SubBatches | Example | Examples, which: Sequence[int], sizes: Sequence[float] = ()
) -> tuple[list[float], bool]:
    """Weights for the numbers of some parts, and whether they give the whole batch's number.

    They do where the other parts have nothing to add: in sums, and in means over what these parts have all of.

    Args:
        by: what weighs them; ``"max"`` and ``"min"`` have no weights.
        batch: the parts' samples, and the weights of their losses.
        which: parts that gave a number.
        sizes: the ``batch_size`` of each of those.
    """
    samples = [batch.samples[part] for part in which]
    if by == "batch_size":
        return normalised(sizes, samples), True
    everything = list(batch.weights) if by == "weights" else normalised(batch.samples, batch.samples)
    if by == "sum" or all(weight == 1 for weight in everything):
        return [1.0] * len(which), True
    some = [everything[part] for part in which]
    complete = not any(weight for part, weight in enumerate(everything) if part not in which)
    return some if complete else normalised(some, samples), complete


def _of_some(by: By, parts: str) -> str:
    """Meaning of a value that other parts of the batch did not log."""
    those = _TEXTS[by].format(them="those")
    return f"was logged by some {parts} only, and is {those}: the whole batch may have logged another value"


def _extreme(values: Sequence[Any], by: By) -> Any:
    device = values[0].device if isinstance(values[0], Tensor) else "cpu"
    tensors = torch.stack([torch.as_tensor(value, device=device) for value in values])
    return tensors.amax() if by == "max" else tensors.amin()


def _are_numbers(number: Number) -> bool:
    return all(_is_number(call.value) for call in number.values())


def _is_number(value: Any) -> bool:
    """Return whether Lightning can log it, other than metrics."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _copied(value: Any) -> Any:
    """The step may change the tensor after it has logged it, as it may without parts."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.squeeze() if copied.numel() == 1 else copied


# Sub-batches of a memory budget.

_SIZE_IN_DOUBT = (
    "is weighted in an epoch's mean by the sum of the sub-batches' batch_size, which was not that of the whole batch"
)


class PartLog:
    """Takes the place of a module's ``log`` while the parts of a batch run, and logs once for the batch.

    Each call of ``training_step`` is logged, the n-th with a name for the n-th of all parts. Numbers are added up as
    the examples of their certificate are, by the ``batch_size`` or samples where those say nothing, which is warned of.
    Torchmetrics objects count and show the whole batch, see :class:`MetricCalls`.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = MetricCalls(module)
        self._parts: list[Calls] = []
        self._collections: dict[int, tuple[MetricCollection, tuple[Any, ...], dict[str, Any]]] = {}
        self._seen: Calls = {}
        self._doubts: dict[str, str] = {}
        self._warned: set[str] = set()

    def clear(self) -> None:
        """Forget the batch."""
        self._parts, self._collections = [], {}
        self._metrics.clear()

    @contextmanager
    def collecting(self, samples: int, *, dry: bool, whole: bool) -> Iterator[dict[str, Any]]:
        """While open, nothing is logged; yields numbers by key, for the step's output.

        Args:
            dry: the part is only tried out. Only then numbers are yielded, as examples for a certificate;
                :meth:`publish` puts together those of real parts, of which some may log what others do not.
            whole: it is the whole batch: its metrics need no help.
        """
        examples: dict[str, Any] = {}
        calls: Calls = {}
        part = None if dry else len(self._parts)
        if not dry:
            self._parts.append(calls)

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            call = record(self._module, calls, name, self._metrics.returned(value) or value, *arguments, **options)
            self._seen.setdefault(call.key, replace(call, value=None, size=None))
            if dry and _is_number(call.value):
                examples.update({call.key: call.value} | ({call.size_key: call.size} if call.sized else {}))

        def log_dict(dictionary: Any, *arguments: Any, **options: Any) -> None:
            if not isinstance(dictionary, MetricCollection):
                LightningModule.log_dict(self._module, dictionary, *arguments, **options)
            elif not dry:
                self._collections[id(dictionary)] = dictionary, arguments, options

        metrics = self._metrics.saving_nothing() if whole else self._metrics.collecting(samples, examples, part)
        with replaced_attributes(self._module, log=log, log_dict=log_dict), metrics:
            yield examples
        if not dry:
            examples.clear()

    def publish(self, parts: SubBatches) -> None:
        """Log what ``training_step`` would have logged for the whole batch, in its order."""

        def argument_weights(key: str, which: Sequence[int]) -> list[float]:
            ways = fitting(parts.certificate, LoggedCall(key))
            weights, complete = shares(ways[0] if ways else "samples", parts, which)
            if not (ways and complete):
                parts.guessed.add(place_of(key))
            return weights

        try:
            with logging_as(self._module, "training_step"):
                self._metrics.publish(parts.samples, argument_weights)
                for number in numbers_of(self._parts).values():
                    call = next(iter(number.values()))
                    value, size = self._value(call, number, parts), _size(number, parts)
                    self._module.log(call.name, value, **call.options, batch_size=size)
                for collection, arguments, options in self._collections.values():
                    self._module.log_dict(collection, *arguments, **options)
        finally:
            self.clear()

    def warn(self, parts: SubBatches) -> None:
        """Say once of each number that it may not be the whole batch's."""
        for call in self._seen.values():
            self._note(call.key, _doubt_before(call, parts.certificate))
        places = {place_of(key) for call in self._seen.values() for key in (call.key, call.size_key)}
        averaged = "is the mean over sub-batches, weighted by samples: no sum of their values gave the whole batch's"
        for place in parts.guessed - places:
            self._doubts.setdefault(place, f"{_called(place)} {averaged}")
        for key in sorted(self._doubts.keys() - self._warned):
            self._warned.add(key)
            warn_difference(
                f"under a memory budget {self._doubts[key]}. Log a torchmetrics object for it: self.log(name, metric)"
            )

    def _note(self, key: str, doubt: str) -> None:
        if doubt:
            self._doubts.setdefault(key, f"the logged value {key!r} {doubt}")

    def _value(self, call: LoggedCall, number: Number, parts: SubBatches) -> Any:
        if isinstance(call.value, tuple):
            returned, entry = call.value
            assert isinstance(returned, MetricCall)
            return returned.value if entry is None else returned.value[entry]
        if len(parts) == 1 or not _are_numbers(number):  # Lightning has an error for what is neither that nor a metric
            return call.value
        value, doubt = _value_and_doubt(call, number, parts)
        self._note(call.key, doubt)
        return value


def place_of(key: str) -> str:
    """Place where a certificate finds what is logged under this key."""
    return f"output['{LOGGED}'][{key!r}]"


def fitting(certificate: Certificate, call: LoggedCall) -> list[By]:
    """Ways in which this number adds up in all examples, the most telling first; all ways where it is always 0."""
    examples = certificate.examples
    if all(place_of(call.key) not in example.whole for example in examples):
        return []
    ways: list[By] = ["batch_size"] if call.sized else []
    ways += ["weights", "samples", "sum", *(by for by in _EXTREMES if by == call.reduced)]
    return [by for by in ways if all(_fits(by, one, call, certificate.tolerance) for one in examples)]


def _fits(by: By, example: Example, call: LoggedCall, tolerance: float) -> bool:
    whole, numbers = _scalars(example, call.key)
    size, sizes = _scalars(example, call.size_key) if by == "batch_size" else (0.0, [])
    if sum(sizes) != size:
        return False
    if by == "batch_size" and not size:  # a mean over nothing has no value
        return True
    if by in _EXTREMES:
        extreme = (max if by == "max" else min)(numbers)
        return abs(extreme - whole) <= tolerance * abs(whole)  # kernels round otherwise for fewer samples
    weights, _ = shares(by, example, range(len(numbers)), sizes)
    terms = [weight * number for weight, number in zip(weights, numbers, strict=True) if weight]
    return abs(math.fsum(terms) - whole) <= tolerance * (abs(whole) + math.fsum(map(abs, terms)))


def _scalars(example: Example, key: str) -> tuple[float, list[float]]:
    """Numbers logged under this key for an example's batch, and for its parts."""
    place = place_of(key)
    return example.whole.get(place, math.nan), [part.get(place, math.nan) for part in example.parts]


def _value_and_doubt(call: LoggedCall, number: Number, parts: SubBatches) -> tuple[Any, str]:
    """The whole batch's value, and where that is in doubt, what it is instead."""
    certificate, values = parts.certificate, [one.value for one in number.values()]
    ways, some_only = fitting(certificate, call), len(number) < len(parts)
    always_0 = "sum" in ways and "samples" in ways  # only zeros are both a sum and a mean
    was_same = not always_0 and _was_same(call.key, certificate)
    alike = len({float(value) for value in values}) == 1
    certain = bool(ways) and not always_0 and (alike or not was_same)
    by = ways[0] if certain else call.assumed
    value, complete = whole_number(by, number, parts)
    if certain and not complete:
        by, certain = by if by in _EXTREMES else "batch_size" if call.sized else "weights", False
        value, _ = whole_number(by, number, parts)
    plain = not certificate.reads and not any(isinstance(one, Tensor) for one in values)
    setting = alike and plain and call.reduced is None  # a number that was read from a tensor may be a count
    usual = always_0 and not some_only and (setting or not any(map(float, values)))
    return value, "" if certain or usual else _doubt(by, some_only, always_0, was_same)


def _doubt_before(call: LoggedCall, certificate: Certificate) -> str:
    """Doubt that the examples leave open, before anything is logged."""
    if not certificate.examples or place_of(call.key) not in certificate.examples[0].whole:
        return ""
    if not fitting(certificate, call):
        return _doubt(call.assumed)
    by_epoch = call.options.get("on_epoch") and call.reduced is None
    adds_up = _adds_up(call.size_key, certificate) or _was_same(call.size_key, certificate)
    return _SIZE_IN_DOUBT if by_epoch and call.sized and not adds_up else ""


def _doubt(by: By, some_only: bool = False, always_0: bool = False, was_same: bool = False) -> str:
    """Meaning of a value that may not be the whole batch's, and why it may not."""
    if some_only:
        return _of_some(by, "sub-batches")
    if always_0 or was_same:
        why = f"it was {'0' if always_0 else 'the same'} in all samples that were examined"
    else:
        why = "no sum of their values gave the whole batch's"
    return f"is {_TEXTS[by].format(them='sub-batches')}: {why}"


def _size(number: Number, parts: SubBatches) -> Any:
    """The whole batch's ``batch_size``; None where Lightning is to look at the batch."""
    calls, certificate = list(number.values()), parts.certificate
    if not all(call.sized for call in calls):
        return None
    key = calls[0].size_key
    same = not _adds_up(key, certificate) and _was_same(key, certificate)
    return calls[0].size if same or len(parts) == 1 else sum(call.size for call in calls)


def _adds_up(key: str, certificate: Certificate) -> bool:
    """Return whether parts had the whole's number as their sum in all examples."""
    return all(whole == sum(some) for whole, some in (_scalars(one, key) for one in certificate.examples))


def _was_same(key: str, certificate: Certificate) -> bool:
    """Return whether all examples gave the same for all of a batch and for each part: a mean then, or a maximum."""
    pairs = [_scalars(one, key) for one in certificate.examples]
    return all({*some} == {whole} and not math.isnan(whole) for whole, some in pairs)


def _called(place: str) -> str:
    logged = f"output['{LOGGED}']["
    if place.startswith(logged):
        return f"a number that training_step gives to a metric ({place.removeprefix(logged).removesuffix(']')})"
    return f"what training_step returns as {place.removeprefix('output')}"


# Micro-batches of a pipeline.

_NEAR, _LOW_PRECISION = 1e-5, 3e-2
"""Relative to the largest of the numbers, as layers compute in 32 bits or in 16."""
_SHARE = 1e-5
_SAME = 1e-9
_WAYS: tuple[By, ...] = ("weights", "samples", "sum")
"""How numbers without a reduction of their own may be put together."""


class _MetricPath(str):
    """Path to a logged metric on the module, of which each rank has its own."""


class PipelineLog:
    """Takes the place of a module's ``log`` while micro-batches run.

    A number is logged once for the batch: those of micro-batches, weighed as their losses, by samples, or added up, as
    its operations tell and the first batch agrees; with a ``reduce_fx`` of sum, max or min theirs. Torchmetrics objects
    have seen all micro-batches; their states go to all ranks.

    Args:
        module: whose metrics are not those of other modules.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._here = threading.local()
        self._metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        self._counts: dict[str, int] = {}
        self._ways: dict[str, By] = {}
        self._either: set[str] = set()  # by samples, as long as losses are weighed by samples too
        self._fallback: By = "weights"
        self._partial: set[str] = set()  # of which it is said that some micro-batches only log it

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around all micro-batches of a batch."""
        self._counts = {name: metric.update_count for name, metric in self._metrics.items()}
        log_dict = partial(LightningModule.log_dict, self._module)  # muted where steps are tried out, as log is
        with replaced_attributes(self._module, log=self._log, log_dict=log_dict):
            yield

    @contextmanager
    def micro_batch(self) -> Iterator[Calls]:
        """Around one of them, in its thread; yields what it logs, which the step is to return as ``LOGGED``."""
        calls: Calls = {}
        self._here.calls = calls
        try:
            yield calls
        finally:
            self._here.calls = None

    def collected(self, calls: Sequence[Calls], weights: Sequence[float], samples: Sequence[int]) -> Any:
        """Message for other ranks: calls put together, and metrics that have changed."""
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        batch = Example({}, (), tuple(samples), tuple(weights))
        if any(abs(weight - size / sum(samples)) > _SAME for weight, size in zip(weights, samples, strict=True)):
            for key in self._either:
                warn_difference(
                    f"the logged value {key!r} may be a mean over samples or over what the loss is a mean over. In the "
                    "first batch both were the same, and in this one they are not: a pipeline takes it as a mean over "
                    "samples from now on. Log a tensor, which shows what it is, in place of a Python number",
                    every_rank=True,  # only the last stage's knows
                )
            self._either.clear()
        return [self._whole(key, number, batch) for key, number in numbers_of(calls).items()], states

    def _whole(self, key: str, number: Number, batch: Example) -> LoggedCall:
        """One call for those of all micro-batches."""
        call = next(iter(number.values()))
        size = sum(one.size for one in number.values()) if all(one.sized for one in number.values()) else None
        if len(batch.samples) == 1 or not _are_numbers(number):
            return replace(call, size=size)
        alike = len({float(one.value) for one in number.values()}) == 1
        if key not in self._ways and call.reduced is None and not alike:
            self._ways[key] = self._fallback
            warn_difference(
                f"the logged value {key!r} was not logged in the first batch, from which a pipeline learns how to "
                "combine the values of micro-batches: it is taken as a mean over what the loss is a mean over, or over "
                "samples if the loss is a sum. Log it in each batch, or a torchmetrics object, which sees all samples",
                every_rank=True,  # only the last stage's knows
            )
        by = self._ways.get(key, call.assumed)
        value, complete = whole_number(by, number, batch)
        some_only = len(number) < len(batch.samples) and (by == "batch_size" or not complete)
        if some_only and key not in self._partial:
            self._partial.add(key)
            warn_difference(
                f"the logged value {key!r} {_of_some(by, 'micro-batches')}. Log it in each of them, or a torchmetrics "
                "object, which sees all samples",
                every_rank=True,  # only the last stage's knows
            )
        return replace(call, size=size, value=value.cpu() if isinstance(value, Tensor) else value)

    def look(self, look: FirstLook, weights: LossWeights) -> None:
        """See how each number of the first batch is to be put together, and say of which there is no way to."""
        if {one.kind for one in weights.weightings} == {"sum"}:
            self._fallback = "samples"
        outputs = [*(one.whole for one in look.examples), *(run.output for run in look.runs)]
        for key, call in outputs[0][LOGGED].items() if outputs else ():
            if isinstance(call.value, _MetricPath):
                if call.options.get("on_step") is not False:
                    warn_difference(
                        f"the metric {call.name!r} is logged in each step: under a pipeline that is the value of the "
                        "step's last micro-batch, while the epoch's value counts all samples. Log it with "
                        "on_step=False, on_epoch=True"
                    )
                continue
            self._ways[key], why = self._way(look, weights, call)
            if why:
                warn_difference(
                    f"the logged value {key!r} is combined from micro-batches under a pipeline, and is not the "
                    f"whole batch's: {why}. Log the means or sums over samples that it is computed from, or a "
                    "torchmetrics object, which sees all samples"
                )

    def _way(self, look: FirstLook, weights: LossWeights, call: LoggedCall) -> tuple[By, str]:
        """Way in which a number is put together, and why that is not the whole batch's."""
        key, ways = call.key, (call.reduced,) if call.reduced else _WAYS
        fallback = call.reduced or self._fallback
        try:
            head = look.head_of(lambda output: getattr(output[LOGGED].get(key), "value", None))
        except NotUnderstoodError as error:
            if call.reduced in (None, "sum"):
                return fallback, f"it is no mean or sum over samples ({error})"
            head = None
        if head is not None and ways == _WAYS:
            kinds = {one.kind for one in head.weightings}
            if head.like_loss or (kinds and set(head.weightings) <= set(weights.weightings)):
                ways = ("weights",)
            elif kinds in ({"mean"}, {"sum"}):
                ways = ("samples",) if kinds == {"mean"} else ("sum",)
            elif kinds:
                return "weights", f"it is a {head.weightings[0]}, and the loss is not"
        misfits = {by: _misfit(by, key, look) for by in ways}
        share_of_loss = _is_share_of_loss(key, look.examples) if ways == _WAYS else False
        if ways == _WAYS and head is None:
            unlike = len(look.examples) > 1 and any(len(_values(key, _counted(one))) > 1 for one in look.examples)
            if not unlike and _is_read(key, look) and not share_of_loss:
                return fallback, "it is a Python number, and the first batch's micro-batches do not show what it is"
        alike = all(len(_values(key, (one.whole, *one.parts))) == 1 for one in look.examples)
        if ways == _WAYS and look.examples and alike:
            return "samples", ""
        fits = [by for by, misfit in misfits.items() if misfit is None]
        if not fits:
            by = fallback if ways == _WAYS else ways[0]
            return by, str(misfits[by])
        by_samples = {one.kind for one in weights.weightings} == {"mean"}
        if fits[:2] == ["weights", "samples"] and not by_samples and not share_of_loss:
            self._either.add(key)
            return "samples", ""
        return fits[0], ""

    def warn_of_aggregates(self) -> None:
        """Say behind the first batch of means and sums of a step's values that they are those of micro-batches."""
        for name, metric in self._metrics.items():
            if isinstance(metric, BaseAggregator) and metric.update_count != self._counts[name]:
                warn_difference(
                    f"{type(metric).__name__} {name!r} takes a value from each micro-batch under a pipeline, not one "
                    "from each batch, so its result differs unless all values are means over equally many samples: "
                    "give update() the number of samples as weight, or use self.log(..., on_epoch=True)"
                )

    def publish(self, logged: Any, *, changed_here: bool) -> None:
        """Log on this rank what :meth:`collected` gave on the last stage's.

        Args:
            logged: that.
            changed_here: this is that rank, whose metrics have the states already.
        """
        calls, states = logged
        if not changed_here:
            for name, state in states.items():
                set_metric_state(self._metrics[name], state)
        with logging_as(self._module, "training_step"):
            for call in calls:
                value = self._metrics[call.value] if isinstance(call.value, _MetricPath) else call.value
                LightningModule.log(self._module, call.name, value, **call.options, batch_size=call.size)

    def _log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        calls = getattr(self._here, "calls", None)
        if calls is None:  # not from a micro-batch's step
            LightningModule.log(self._module, name, value, *arguments, **options)
            return
        if isinstance(value, Metric):
            path = next((path for path, one in self._metrics.items() if one is value), None)
            if path is None:
                raise ValueError(
                    f"the metric logged as {name!r} is not an attribute of the module: make it one, so that the other "
                    "ranks of the pipeline find it"
                )
            value = _MetricPath(path)
        record(self._module, calls, name, value, *arguments, **options)


def _values(key: str, outputs: Sequence[Any]) -> set[float]:
    """Values that steps logged, as far as they did."""
    return {float(output[LOGGED][key].value) for output in outputs if key in output[LOGGED]}


def _counted(one: Examples) -> list[Any]:
    """Return what a step gave for the micro-batches that count: a loss over nothing shows nothing."""
    return [part for part, weight in zip(one.parts, one.weights, strict=True) if weight]


def _is_read(key: str, look: FirstLook) -> bool:
    """Return whether a number follows from values that were read; of what cannot be followed, whether it may."""
    if not look.runs:
        return not look.examples
    here = _values(key, [look.runs[0].output])
    others = [run for run in look.altered if run is not None]
    return len(others) < len(look.altered) or any(_values(key, [run.output]) != here for run in others)


def _is_share_of_loss(key: str, examples: Sequence[Examples]) -> bool:
    """Return whether a number is the loss times a constant, in all that was seen."""
    outputs = [output for one in examples for output in (one.whole, *_counted(one))]
    if not all(key in output[LOGGED] and float(loss_of(output)) for output in outputs):
        return False
    ratios = [float(output[LOGGED][key].value) / float(loss_of(output)) for output in outputs]
    return bool(ratios) and max(ratios) - min(ratios) <= _SHARE * abs(ratios[0])


def _misfit(by: By, key: str, look: FirstLook) -> str | None:
    """Text on where a number put together this way differs most from the whole batch's; None where it never does."""
    worst, message = 0.0, None
    for index, one in enumerate(look.examples):
        whole = one.whole[LOGGED].get(key)
        number = numbers_of([part[LOGGED] for part in one.parts]).get(key)
        if whole is None or number is None:
            continue
        there, here = float(whole.value), float(whole_number(by, number, one)[0])
        values = [abs(float(call.value)) for part, call in number.items() if one.weights[part] or by != "weights"]
        low = look.low_precision or torch.as_tensor(whole.value).dtype in (torch.bfloat16, torch.float16)
        near = _LOW_PRECISION if low else _NEAR
        largest = max([abs(there), *filter(math.isfinite, values)])
        off = abs(here - there) / largest if largest else 0.0 if here == there else math.inf
        if math.isfinite(there) and not off <= max(near, worst):
            worst = off if math.isfinite(off) else math.inf
            where = "where outputs of layers are others, sample by sample" if index else "in the first batch"
            message = f"{here:.4g} for {there:.4g} {where}"
    return message
