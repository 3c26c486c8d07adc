"""What `training_step` logs for parts of a batch, sub-batches or micro-batches, is put together and logged once."""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

_LOG = inspect.signature(LightningModule.log)

# Numbers that sub-batches log, put together to what ``training_step`` would have logged for the whole batch.
#
# The batch's number is a weighted sum of its parts' numbers: by the loss's weights, by samples, as a plain sum, or by
# the ``batch_size`` that each part gave. Which of them holds is seen in the small batches that a certificate was given
# for, whole and in parts.

LOGGED = "logged"
"""Under this key a step returns what it logged, so that a certificate has examples of it."""

By: TypeAlias = Literal["weights", "batch_size", "samples", "sum", "max", "min"]

_TEXTS: dict[By, str] = {
    "weights": "the mean over {them}, weighed by samples or as the loss",
    "samples": "the mean over {them}, weighed by samples",
    "batch_size": "the mean over {them}, weighed by the batch_size that each gave",
    "sum": "the sum over {them}, as its reduce_fx says",
    "max": "the maximum over {them}, as its reduce_fx says",
    "min": "the minimum over {them}, as its reduce_fx says",
}
_MEANS = ("mean", "avg")
_EXTREMES: tuple[By, ...] = ("max", "min")
_SIZE_IN_DOUBT = (
    "has the sum of the sub-batches' batch_size as its weight in an epoch's mean: they did not add up to the whole's"
)


def place_of(key: str) -> str:
    """Where a certificate finds what is logged under this key."""
    return f"output['{LOGGED}'][{key!r}]"


def shares(
    by: By, batch: SubBatches | Example, which: Sequence[int], sizes: Sequence[float] = ()
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


def fitting(certificate: Certificate, place: str, size_place: str | None = None, reduction: str = "mean") -> list[By]:
    """How this number adds up in all examples, the most telling way first; all ways where it is always 0.

    Args:
        reduction: of an epoch's values: where it is a maximum or minimum, a batch's value may be one too.
    """
    examples = certificate.examples
    if all(place not in example.whole for example in examples):
        return []
    ways: list[By] = ["weights", "samples", "sum"]
    ways += [by for by in _EXTREMES if by == reduction]
    if size_place is not None:
        ways.insert(0, "batch_size")
    return [by for by in ways if all(_fits(by, one, place, size_place, certificate.tolerance) for one in examples)]


def _fits(by: By, example: Example, place: str, size_place: str | None, tolerance: float) -> bool:
    numbers, sizes = _scalars(example, place), _scalars(example, size_place) if size_place is not None else []
    if by == "batch_size" and sum(sizes) != example.whole.get(str(size_place)):
        return False
    if by == "batch_size" and not sum(sizes):  # a mean over nothing has no value
        return True
    if by in _EXTREMES:
        return (max if by == "max" else min)(numbers) == example.whole.get(place)
    weights, _ = shares(by, example, range(len(numbers)), sizes)
    terms = [weight * number for weight, number in zip(weights, numbers, strict=True) if weight]
    whole = example.whole.get(place, math.nan)
    return abs(math.fsum(terms) - whole) <= tolerance * (abs(whole) + math.fsum(map(abs, terms)))


def _scalars(example: Example, place: str) -> list[float]:
    return [part.get(place, math.nan) for part in example.parts]


@dataclass
class LoggedNumber:
    """The n-th call of ``log`` with one name, and what the parts of a batch gave it.

    Attributes:
        name: that is logged.
        call: how often the same part logged that name before.
        options: of ``log``, but for ``batch_size``.
        sized: a ``batch_size`` is given.
        values: by part.
        sizes: by part; None where Lightning is to look at the batch.
    """

    name: str
    call: int
    options: dict[str, Any]
    sized: bool
    values: dict[int, Any] = field(default_factory=dict)
    sizes: dict[int, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name if not self.call else f"{self.name} (call {self.call + 1})"

    @property
    def size_key(self) -> str:
        return f"batch_size of {self.key}"

    def value(self, parts: SubBatches) -> tuple[Any, str]:
        """The whole batch's value, and where that is in doubt, what it is instead."""
        values, which = list(self.values.values()), list(self.values)
        if len(parts) == 1 or not all(map(is_number, values)):  # Lightning has an error for what is no number
            return values[0], ""
        ways, some_only = self._fitting(parts.certificate), len(which) < len(parts)
        always_0 = _always_0(ways)
        was_same = not always_0 and self._was_same(parts.certificate)
        alike = len({float(value) for value in values}) == 1
        known = bool(ways) and not always_0 and (alike or not was_same)
        by, certain = (ways[0], True) if known else (self._assumed, False)
        weights, complete = self._shares(by, parts)
        if certain and not complete:
            by, certain = by if by in _EXTREMES else "batch_size" if self.sized else "weights", False
            weights, _ = self._shares(by, parts)
        plain = not parts.certificate.reads and not any(isinstance(value, Tensor) for value in values)
        setting = alike and plain and self._reduction in _MEANS  # a number that was read from a tensor may be a count
        usual = always_0 and not some_only and (setting or not any(map(float, values)))
        doubt = "" if certain or usual else _doubt(by, some_only, always_0, was_same)
        return _extreme(values, by) if by in _EXTREMES else combined_scalar(values, weights), doubt

    def size(self, parts: SubBatches) -> Any:
        """The whole batch's ``batch_size``; None where Lightning is to look at the batch."""
        sizes = list(self.sizes.values())
        if any(size is None for size in sizes):
            return None
        return sizes[0] if len(parts) == 1 or self._size_is(parts.certificate) == "same" else sum(sizes)

    def doubt(self, certificate: Certificate) -> str:
        """What the examples leave open, before anything is logged."""
        if not certificate.examples or place_of(self.key) not in certificate.examples[0].whole:
            return ""
        ways = self._fitting(certificate)
        if not ways:
            return _doubt(self._assumed)
        by_epoch = self.options.get("on_epoch") and self._reduction in _MEANS
        return _SIZE_IN_DOUBT if by_epoch and self.sized and not self._size_is(certificate) else ""

    @property
    def _reduction(self) -> str:
        reduce_fx = self.options.get("reduce_fx", "mean")
        return (reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")).lower()

    @property
    def _assumed(self) -> By:
        """How numbers add up that no example tells of."""
        by_name: dict[str, By] = {"sum": "sum", "max": "max", "min": "min"}
        return by_name.get(self._reduction, "batch_size" if self.sized else "samples")

    def _fitting(self, certificate: Certificate) -> list[By]:
        size_place = place_of(self.size_key) if self.sized else None
        return fitting(certificate, place_of(self.key), size_place, self._reduction)

    def _was_same(self, certificate: Certificate) -> bool:
        """Whether all examples gave the same for all of a batch and for each part: a mean then, or a maximum."""
        place = place_of(self.key)
        return all({*_scalars(example, place)} == {example.whole.get(place)} for example in certificate.examples)

    def _shares(self, by: By, parts: SubBatches) -> tuple[list[float], bool]:
        sizes = [0.0 if size is None else float(size) for size in self.sizes.values()] if by == "batch_size" else []
        return shares(by, parts, list(self.values), sizes)

    def _size_is(self, certificate: Certificate) -> str:
        """``"sum"`` of the parts' sizes, the ``"same"`` for all of them, or neither."""
        place = place_of(self.size_key)
        pairs = [(example.whole.get(place), _scalars(example, place)) for example in certificate.examples]
        if all(sum(sizes) == whole for whole, sizes in pairs):
            return "sum"
        return "same" if all({*sizes} == {whole} for whole, sizes in pairs) else ""


def _always_0(ways: Sequence[By]) -> bool:
    """Only zeros are both a sum and a mean."""
    return "sum" in ways and "samples" in ways


def _doubt(by: By, some_only: bool = False, always_0: bool = False, was_same: bool = False) -> str:
    """What a value is that may not be the whole batch's, and why."""
    if some_only:
        return (
            f"was logged by some sub-batches only, and is {_TEXTS[by].format(them='those')}: the whole batch may have "
            "logged another"
        )
    if always_0 or was_same:
        why = f"it was {'0' if always_0 else 'the same'} in all samples that were examined"
    else:
        why = "no sum of their values gave the whole batch's"
    return f"is {_TEXTS[by].format(them='sub-batches')}: {why}"


def is_number(value: Any) -> bool:
    """What Lightning can log, other than metrics."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _extreme(values: Sequence[Any], by: By) -> Any:
    device = values[0].device if isinstance(values[0], Tensor) else "cpu"
    tensors = torch.stack([torch.as_tensor(value, device=device) for value in values])
    return tensors.amax() if by == "max" else tensors.amin()


# Sub-batches of a memory budget.


class PartLog:
    """Takes the place of a module's ``log`` while the parts of a batch run, and logs once for the batch.

    Each call of ``training_step`` is logged, the n-th with a name for the n-th of all parts. Numbers are added up as
    the examples of their certificate are, by the ``batch_size`` or samples where those say nothing, which is warned of
    (:class:`LoggedNumber`). Torchmetrics objects count and show the whole batch, see :class:`MetricCalls`.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = MetricCalls(module)
        self._parts = 0
        self._numbers: dict[tuple[str, int], LoggedNumber] = {}
        self._collections: dict[int, tuple[MetricCollection, tuple[Any, ...], dict[str, Any]]] = {}
        self._known: dict[str, LoggedNumber] = {}
        self._doubts: dict[str, str] = {}
        self._warned: set[str] = set()

    def clear(self) -> None:
        """Forget the batch."""
        self._parts = 0
        self._numbers, self._collections = {}, {}
        self._metrics.clear()

    @contextmanager
    def collecting(self, samples: int, *, dry: bool, whole: bool) -> Iterator[dict[str, Any]]:
        """While open, nothing is logged; yields numbers by key, for the step's output.

        Args:
            samples: of the part.
            dry: the part is only tried out. Only then numbers are yielded, as examples for a certificate;
                :meth:`publish` puts together those of real parts, of which some may log what others do not.
            whole: it is the whole batch: its metrics need no help.
        """
        examples: dict[str, Any] = {}
        counted: Counter[str] = Counter()
        part = None if dry else self._parts
        self._parts += not dry

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            options = _LOG.bind(self._module, name, value, *arguments, **options).arguments
            size = _copied(options.pop("batch_size", None))
            options = {key: options[key] for key in options if key not in ("self", "name", "value")}
            number = LoggedNumber(name, counted[name], options, size is not None)
            counted[name] += 1
            self._known.setdefault(number.key, number)
            value = self._metrics.returned(value) or _copied(value)
            if part is not None:
                number = self._numbers.setdefault((name, number.call), number)
                number.values[part], number.sizes[part] = value, size
            elif is_number(value):
                examples.update({number.key: value} | ({number.size_key: size} if size is not None else {}))

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
        module, numbers, collections = self._module, self._numbers, self._collections

        def argument_weights(key: str, which: Sequence[int]) -> list[float]:
            ways = fitting(parts.certificate, place_of(key))
            weights, complete = shares(ways[0] if ways else "samples", parts, which)
            if not (ways and complete):
                parts.guessed.add(place_of(key))
            return weights

        try:
            with logging_as(module, "training_step"):
                self._metrics.publish(parts.samples, argument_weights)
                for number in numbers.values():
                    module.log(number.name, self._value(number, parts), **number.options, batch_size=number.size(parts))
                for collection, arguments, options in collections.values():
                    module.log_dict(collection, *arguments, **options)
        finally:
            self.clear()

    def warn(self, parts: SubBatches) -> None:
        """Say once of each number that it may not be the whole batch's."""
        places: set[str] = set()
        for number in self._known.values():
            places |= {place_of(number.key), place_of(number.size_key)}
            if doubt := number.doubt(parts.certificate):
                self._doubts.setdefault(number.key, f"the logged value {number.key!r} {doubt}")
        averaged = "is the mean over sub-batches, weighed by samples: no sum of their values gave the whole batch's"
        for place in parts.guessed - places:
            self._doubts.setdefault(place, f"{_called(place)} {averaged}")
        for key in sorted(self._doubts.keys() - self._warned):
            self._warned.add(key)
            warn_difference(
                f"under a memory budget {self._doubts[key]}. Log a torchmetrics object for it: self.log(name, metric)"
            )

    def _value(self, number: LoggedNumber, parts: SubBatches) -> Any:
        first = next(iter(number.values.values()))
        if isinstance(first, Metric):
            return first
        if isinstance(first, tuple):
            call, entry = first
            assert isinstance(call, MetricCall)
            return call.value if entry is None else call.value[entry]
        value, doubt = number.value(parts)
        if doubt:
            self._doubts.setdefault(number.key, f"the logged value {number.key!r} {doubt}")
        return value


def _copied(value: Any) -> Any:
    """The step may change the tensor after it has logged it, as it may without parts."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.squeeze() if copied.numel() == 1 else copied


def _called(place: str) -> str:
    logged = f"output['{LOGGED}']["
    if place.startswith(logged):
        return f"a number that training_step gives to a metric ({place.removeprefix(logged).removesuffix(']')})"
    return f"what training_step returns as {place.removeprefix('output')}"


# Micro-batches of a pipeline.

_METRIC = "metric"
_NEAR, _LOW_PRECISION = 1e-5, 3e-2
"""Relative to the largest of the numbers, as layers compute in 32 bits or in 16."""
_SHARE = 1e-5
_REDUCED = ("sum", "max", "amax", "min", "amin")
"""Ways to reduce that micro-batches are reduced by as well."""
_RULES = ("loss", "samples", "sum")
"""How else numbers are put together: weighed as losses, by samples, or not at all."""
_EITHER = "either"
"""By samples, as long as losses are weighed by samples too."""
_SAME = 1e-9
_Key = tuple[str, int]


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
        self._rules: dict[_Key, str] = {}
        self._fallback = "loss"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around all micro-batches of a batch."""
        self._counts = {name: metric.update_count for name, metric in self._metrics.items()}
        with replaced_attributes(self._module, log=self._log, log_dict=self._log_dict):
            yield

    @contextmanager
    def micro_batch(self) -> Iterator[list[dict[str, Any]]]:
        """Around one of them, in its thread; yields what it logs."""
        calls: list[dict[str, Any]] = []
        self._here.calls = calls
        try:
            yield calls
        finally:
            self._here.calls = None

    def collected(
        self, calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float], samples: Sequence[int]
    ) -> Any:
        """What other ranks are to be told: calls put together, and metrics that have changed.

        Args:
            calls: of each micro-batch.
            weights: of their losses.
            samples: in them.
        """
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        numbers = _numbers(calls, weights, samples)
        unlike = any(abs(weight - size / sum(samples)) > _SAME for weight, size in zip(weights, samples, strict=True))
        for key in [key for key, rule in self._rules.items() if rule == _EITHER and unlike]:
            self._rules[key] = "samples"
            warn_difference(
                f"the logged value {key[0]!r} is a mean over samples or over what the loss is a mean over, which were "
                "the same in the first batch and are not in this one: under a pipeline it is taken for a mean over "
                "samples from now on. Log the tensor in place of a number of Python's, which does not tell",
                every_rank=True,  # only the last stage's knows
            )
        for key, found in numbers.items():
            if key not in self._rules and not _is_clear(found):
                self._rules[key] = self._fallback
                warn_difference(
                    f"the logged value {key[0]!r} was not logged in the first batch, which shows how a pipeline has to "
                    "put such values together from micro-batches: it is taken for a mean over what the loss is a mean "
                    "over, or over samples where that is a sum. Log it in each batch, or a torchmetrics object, which "
                    "sees all samples",
                    every_rank=True,  # only the last stage's knows
                )
        return [_combined(found, self._rules.get(key, "")) for key, found in numbers.items()], states

    def look(self, look: FirstLook, weights: LossWeights, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> None:
        """See how each number of the first batch is to be put together, and say of which there is no way to.

        Args:
            look: at the first batch.
            weights: of micro-batches' losses.
            calls: what was logged, in what a step returned.
        """
        if {one.kind for one in weights.weightings} == {"sum"}:
            self._fallback = "samples"
        outputs = [*(one.whole for one in look.examples), *(run.output for run in look.runs)]
        for key, call in _numbered(calls(outputs[0]) if outputs else ()):
            if _METRIC in call:
                if call.get("on_step") is not False:
                    warn_difference(
                        f"the metric {call['name']!r} is logged in each step: what is shown there is its last "
                        "micro-batch's under a pipeline, and the epoch's value is that of all samples: log it with "
                        "on_step=False, on_epoch=True"
                    )
                continue
            rule, why = self._rule(look, weights, key, call, calls)
            self._rules[key] = rule
            if why:
                warn_difference(
                    f"the logged value {call['name']!r} is put together from micro-batches under a pipeline, and is "
                    f"not the whole batch's: {why}. Log the means or sums over samples that it is computed from, or a "
                    "torchmetrics object, which sees all samples"
                )

    def _rule(
        self,
        look: FirstLook,
        weights: LossWeights,
        key: _Key,
        call: dict[str, Any],
        calls: Callable[[Any], Sequence[dict[str, Any]]],
    ) -> tuple[str, str]:
        """How a number is put together, and why that is not the whole batch's."""
        rules: tuple[str, ...] = ("reduced",) if _reduction(call) in _REDUCED else _RULES
        try:
            head = look.head_of(lambda output: dict(_numbered(calls(output))).get(key, {}).get("value"))
        except NotUnderstoodError as error:
            if rules == _RULES or _reduction(call) == "sum":
                return self._fallback, f"it is no mean or sum over samples ({error})"
            head = None
        if head is not None and rules == _RULES:
            kinds = {one.kind for one in head.weightings}
            if head.like_loss or (kinds and set(head.weightings) <= set(weights.weightings)):
                rules = ("loss",)
            elif kinds in ({"mean"}, {"sum"}):
                rules = ("samples",) if kinds == {"mean"} else ("sum",)
            elif kinds:
                return "loss", f"it is a {head.weightings[0]}, and the loss is not"
        found = {rule: _misfits(rule, key, look, calls) for rule in rules}
        if rules == _RULES and head is None:
            unlike = len(look.examples) > 1 and any(
                len(_values(key, _counted(one), calls)) > 1 for one in look.examples
            )
            if not unlike and _is_read(key, look, calls) and not _is_share_of_loss(key, look.examples, calls):
                return (
                    self._fallback,
                    "it is no tensor, and the first batch does not show of unlike micro-batches what it is",
                )
        if rules == _RULES and look.examples and all(_is_constant(key, one, calls) for one in look.examples):
            return "samples", ""
        fitting = [rule for rule, misfits in found.items() if misfits is None]
        if not fitting:
            rule = self._fallback if rules == _RULES else rules[0]
            return rule, str(found[rule])
        by_samples = {one.kind for one in weights.weightings} == {"mean"}
        if fitting[:2] == ["loss", "samples"] and not by_samples and not _is_share_of_loss(key, look.examples, calls):
            return _EITHER, ""
        return fitting[0], ""

    def warn_of_aggregates(self) -> None:
        """Behind the first batch: say of means and sums of a step's values that they are those of micro-batches."""
        for name, metric in self._metrics.items():
            if isinstance(metric, BaseAggregator) and metric.update_count != self._counts[name]:
                warn_difference(
                    f"{type(metric).__name__} {name!r} takes a value from each micro-batch under a pipeline, in place "
                    "of one from each batch, and gives another result where that is no mean over equally many "
                    "samples: give update() the number of samples as weight, or use self.log(..., on_epoch=True)"
                )

    def publish(self, told: Any, *, changed_here: bool) -> None:
        """Log on this rank what :meth:`collected` gave on the last stage's.

        Args:
            told: that.
            changed_here: this is that rank, whose metrics have the states already.
        """
        calls, states = told
        if not changed_here:
            for name, state in states.items():
                set_metric_state(self._metrics[name], state)
        with logging_as(self._module, "training_step"):
            for call in calls:
                options = {key: value for key, value in call.items() if key not in ("name", "value", _METRIC)}
                value = self._metrics[call[_METRIC]] if _METRIC in call else call["value"]
                LightningModule.log(self._module, call["name"], value, **options)

    def _log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        calls = getattr(self._here, "calls", None)
        if calls is None:  # not from a micro-batch's step
            LightningModule.log(self._module, name, value, *arguments, **options)
            return
        given = _LOG.bind(self._module, name, value, *arguments, **options).arguments
        call = {key: given[key] for key in given if key not in ("self", "value")}
        if isinstance(value, Metric):
            call[_METRIC] = next((path for path, one in self._metrics.items() if one is value), None)
            if call[_METRIC] is None:
                raise ValueError(
                    f"the metric logged as {name!r} is no attribute of the module: other ranks of the pipeline cannot "
                    "find it; make it one"
                )
        else:
            call["value"] = value.detach().clone() if isinstance(value, Tensor) else value
        calls.append(call)

    def _log_dict(self, dictionary: Any, *arguments: Any, **options: Any) -> None:
        items = (
            dictionary.items() if not isinstance(dictionary, MetricCollection) else dictionary.items(keep_base=False)
        )
        for name, value in items:
            self._log(name, value, *arguments, **options)


_Found = list[tuple[dict[str, Any], float, int]]


def _numbered(calls: Sequence[dict[str, Any]]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    """The n-th call with a name is another number than the first."""
    counted: Counter[str] = Counter()
    for call in calls:
        yield (call["name"], counted[call["name"]]), call
        counted[call["name"]] += 1


def _numbers(
    calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float], samples: Sequence[int]
) -> dict[_Key, _Found]:
    numbers: dict[_Key, _Found] = {}
    for micro_batch, weight, size in zip(calls, weights, samples, strict=True):
        for key, call in _numbered(micro_batch):
            numbers.setdefault(key, []).append((call, weight, size))
    return numbers


def _reduction(call: dict[str, Any]) -> str:
    reduce = call.get("reduce_fx", "mean")
    return reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")


def _is_clear(found: _Found) -> bool:
    """Whether there is one way to put numbers together, or all are the same."""
    call = found[0][0]
    if _METRIC in call or len(found) == 1 or _reduction(call) in _REDUCED:
        return True
    return len({float(one["value"]) for one, _, _ in found}) == 1


def _values(key: _Key, outputs: Sequence[Any], calls: Callable[[Any], Sequence[dict[str, Any]]]) -> set[float]:
    """What steps logged, as far as they did."""
    logged = [dict(_numbered(calls(output))).get(key) for output in outputs]
    return {float(call["value"]) for call in logged if call is not None}


def _counted(one: Examples) -> list[Any]:
    """Return what a step gave for the micro-batches that count: a loss over nothing shows nothing."""
    return [part for part, weight in zip(one.parts, one.weights, strict=True) if weight]


def _is_constant(key: _Key, one: Examples, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> bool:
    """Whether a number is the same for a batch and each of its parts."""
    return len(_values(key, (one.whole, *one.parts), calls)) == 1


def _is_read(key: _Key, look: FirstLook, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> bool:
    """Whether a number follows from values that were read; of what cannot be followed, whether it may."""
    if not look.runs:
        return not look.examples
    here = _values(key, [look.runs[0].output], calls)
    others = [run for run in look.altered if run is not None]
    return len(others) < len(look.altered) or any(_values(key, [run.output], calls) != here for run in others)


def _is_share_of_loss(
    key: _Key, examples: Sequence[Examples], calls: Callable[[Any], Sequence[dict[str, Any]]]
) -> bool:
    """Whether a number is the loss times a constant, in all that was seen."""
    outputs = [output for one in examples for output in (one.whole, *_counted(one))]
    if not all(float(loss_of(output)) for output in outputs):
        return False
    shares = [float(dict(_numbered(calls(output)))[key]["value"]) / float(loss_of(output)) for output in outputs]
    return bool(shares) and max(shares) - min(shares) <= _SHARE * abs(shares[0])


def _misfits(rule: str, key: _Key, look: FirstLook, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> str | None:
    """Where a number that is put together by a rule differs most from the whole batch's; None where it never does."""
    worst, said = 0.0, None
    for number, one in enumerate(look.examples):
        whole = dict(_numbered(calls(one.whole))).get(key)
        found = _numbers([calls(part) for part in one.parts], one.weights, one.samples).get(key)
        if whole is None or found is None:
            continue
        there, here = float(whole["value"]), float(_combined(found, rule)["value"])
        values = [abs(float(call["value"])) for call, weight, _ in found if weight or rule != "loss"]
        low = look.low_precision or torch.as_tensor(whole["value"]).dtype in (torch.bfloat16, torch.float16)
        near = _LOW_PRECISION if low else _NEAR
        largest = max([abs(there), *filter(math.isfinite, values)])
        off = abs(here - there) / largest if largest else 0.0 if here == there else math.inf
        if math.isfinite(there) and not off <= max(near, worst):
            worst = off if math.isfinite(off) else math.inf
            where = "where outputs of layers are others, sample by sample" if number else "in the first batch"
            said = f"{here:.4g} for {there:.4g} {where}"
    return said


def _combined(found: _Found, rule: str = "") -> dict[str, Any]:
    """One call for those of the same name in all micro-batches."""
    call = dict(found[0][0])
    sizes = [one.get("batch_size") for one, _, _ in found]
    if all(size is not None for size in sizes):
        call["batch_size"] = sum(sizes)
    if _METRIC in call or len(found) == 1:
        return call
    given = [torch.as_tensor(one["value"]).cpu().squeeze() for one, _, _ in found]
    values = torch.stack([value.double() for value in given])
    name = _reduction(call)
    weights = torch.tensor([weight for _, weight, _ in found], dtype=torch.float64)
    samples = torch.tensor([size for _, _, size in found], dtype=torch.float64)
    counts = weights != 0  # a loss over nothing has no value
    if name == "sum" or (rule == "sum" and name not in _REDUCED):
        call["value"] = values.sum()
    elif name in ("max", "amax"):
        call["value"] = values.max()
    elif name in ("min", "amin"):
        call["value"] = values.min()
    elif rule == "loss":
        call["value"] = (values * weights)[counts].sum()
    elif rule in ("samples", _EITHER):
        call["value"] = (values * samples).sum() / samples.sum()
    else:
        call["value"] = (values * weights)[counts].sum() / weights.sum()
    kind = given[0].dtype if given[0].is_floating_point() else torch.get_default_dtype()
    call["value"] = call["value"].to(kind)
    return call
