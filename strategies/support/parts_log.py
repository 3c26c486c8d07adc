"""What `training_step` logs for parts of a batch, sub-batches or micro-batches, is put together and logged once.

A batch's number is a weighted sum of its parts' numbers: by the loss's weights, by samples, as a plain sum, or by the
``batch_size`` that each part gave; or their maximum or minimum, where ``reduce_fx`` says so. Which of them holds is
seen where the same samples ran whole and in parts: in the examples of a budget's certificate, and in the first batch of
a pipeline.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MetricCollection

from retime.foundations.messages import warn_difference
from retime.foundations.parts import Certificate, Example, Weighting, combined_scalar, normalised
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.memory_budget import SubBatches
from retime.mechanisms.pipeline import Examples
from retime.strategies.support.lightning_private import logging_as
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


def of_some(by: By, parts: str) -> str:
    """Meaning of a value that other parts of the batch did not log."""
    those = _TEXTS[by].format(them="those")
    return f"was logged by some {parts} only, and is {those}: the whole batch may have logged another value"


def _extreme(values: Sequence[Any], by: By) -> Any:
    device = values[0].device if isinstance(values[0], Tensor) else "cpu"
    tensors = torch.stack([torch.as_tensor(value, device=device) for value in values])
    return tensors.amax() if by == "max" else tensors.amin()


def are_numbers(number: Number) -> bool:
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
        if len(parts) == 1 or not are_numbers(number):  # Lightning has an error for what is neither that nor a metric
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
    is_mean = certificate.outputs.get(place_of(call.key)) == Weighting("mean")  # as its operations tell
    ways += [*(("samples", "weights") if is_mean else ("weights", "samples")), "sum"]
    ways += [by for by in _EXTREMES if by == call.reduced]
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
    place, some_only = place_of(call.key), len(number) < len(parts)
    if not some_only and place in certificate.told and certificate.outputs[place].kind == "count":
        return combined_scalar(values, parts.weights_of(place)), ""
    ways = fitting(certificate, call)
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
        return of_some(by, "sub-batches")
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
