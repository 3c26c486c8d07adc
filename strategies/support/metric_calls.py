"""Where sub-batches ran, torchmetrics objects count and show one batch, not its parts."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running

from retime.foundations.parts import Certificate, Example, combined, combined_scalar, normalised
from retime.foundations.patching import replaced_attributes
from retime.foundations.preserve_state import undisturbed
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import tree_map
from retime.mechanisms.memory_budget import ResidentTensor, SubBatches
from retime.strategies.support.lightning_private import show_as_step_value, sync_on_forward

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


ARGUMENT = "argument of metric"
"""Names of numbers that metrics are given begin so."""

AnyMetric: TypeAlias = Metric | MetricCollection
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
WeightsOf: TypeAlias = Callable[[str, Sequence[int]], Sequence[float]]

_SMALL_BYTES = 64
"""Arguments of a call that take no more a sample wait until the batch is complete."""


@dataclass(eq=False)
class MetricCall:
    """One call of a metric in ``training_step``.

    Attributes:
        metric: what is called.
        empty: a copy of it that has counted nothing.
        returns: it was ``forward``, so there is a value of the batch.
        key: names its numbers in examples of a certificate.
        given: arguments by part, detached, until they go to the metric.
        total: a copy that counts this batch only, once arguments went to the metric part by part.
        value: of the whole batch; after :meth:`finish`.
    """

    metric: AnyMetric
    empty: AnyMetric
    returns: bool
    key: str
    given: dict[int, Arguments] = field(default_factory=dict)
    total: AnyMetric | None = None
    value: Any = None

    def finish(self, samples: Sequence[int], weights_of: WeightsOf) -> None:
        """Give the metric what it was not given yet, and let it show the batch's value."""
        whole = self._joined(samples, weights_of) if self.total is None else None
        if whole is not None:
            call: Callable[..., Any] = self.metric if self.returns else self.metric.update
            self.value = call(*whole[0], **whole[1])
        else:
            self.pass_on()
            if self.returns:
                self.value = _computed(self.metric, self.total)
                _show(self.metric, self.total)
        self.given.clear()

    def pass_on(self) -> None:
        """Give the metric each part's arguments as they are."""
        self.total = self.total or copy.deepcopy(self.empty)
        for arguments, options in self.given.values():
            self.metric.update(*arguments, **options)
            self.total.update(*arguments, **options)
        self.given.clear()

    def numbers(self, given: Arguments) -> dict[str, Any]:
        """Scalars among the arguments, by key."""
        return {
            self._key_of(name): value
            for name, value in _by_name(given).items()
            if (isinstance(value, Tensor) and value.dim() == 0) or type(value) in (int, float)
        }

    def _key_of(self, name: str) -> str:
        return f"{ARGUMENT} {self.key}.{name}"

    def _joined(self, samples: Sequence[int], weights_of: WeightsOf) -> Arguments | None:
        """The arguments for the whole batch; None where they cannot be put together."""
        by_part = [_by_name(given) for given in self.given.values()]
        which = list(self.given)
        some = [samples[part] for part in which]

        def joined(name: str) -> Any:
            return _joined([given[name] for given in by_part], some, lambda _: weights_of(self._key_of(name), which))

        try:
            whole = {name: joined(name) for name in by_part[0]}
        except (KeyError, ValueError):
            return None
        count = len(self.given[which[0]][0])
        return tuple(whole.values())[:count], dict(list(whole.items())[count:])


class MetricCalls:
    """Takes the place of ``forward`` and ``update`` of a module's metrics while the parts of a batch run.

    Small arguments (numbers, labels) are put together and given to the metric once, as the whole batch would have
    been. Large ones (logits) would fill the memory that sub-batches save, so the metric is updated with each part, and
    a copy of it that starts empty computes the batch's value. That is the same for metrics that add up samples; one
    that counts calls (``Running``) gets its arguments once, whatever their size.

    ``compute()`` inside of ``training_step`` knows of the batches before this one, and of none of its small arguments.
    A part's value may be a part of the loss where the metric says that it is differentiable.

    What metrics save for a gradient has no number in a plan and stays where it is: dry runs, in which their checks of
    values cannot be followed, would else count other storages than real steps, and each step would be planned anew.

    Args:
        module: its submodules, and metrics in lists and dicts of theirs, are looked through.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [(metric, _empty(metric)) for metric in metrics_of(module)]
        self._calls: dict[str, MetricCall] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._returned: MutableMapping[Any, tuple[MetricCall, str | None]] = WeakTensorKeyDictionary()
        self._passing_on = False

    def clear(self) -> None:
        """Forget the batch."""
        self._calls = {}
        self._returned.clear()

    def returned(self, value: Any) -> tuple[MetricCall, str | None] | None:
        """Which call returned this very value for a part, and under which name; None if none did."""
        return self._returned.get(value) if isinstance(value, Tensor) else None

    @contextmanager
    def collecting(self, samples: int, numbers: dict[str, Any], part: int | None) -> Iterator[None]:
        """One part runs.

        Args:
            samples: of the part.
            numbers: takes scalar arguments by name, for a certificate.
            part: its number; None where it is only tried out, and metrics are to count nothing.
        """
        counted: Counter[int] = Counter()

        def stand_in(index: int, name: str) -> Callable[..., Any]:
            metric, empty = self._metrics[index]
            real = getattr(metric, name)

            def call(*arguments: Any, **options: Any) -> Any:
                if self._passing_on:  # a collection that is updated updates its metrics
                    return real(*arguments, **options)
                key = f"{index}.{counted[index]}"
                counted[index] += 1
                one = self._calls.get(key) or MetricCall(metric, empty, name == "forward", key)
                detached: Arguments = tree_map(_detached, (arguments, options))
                numbers.update(one.numbers(detached))
                if part is not None:
                    self._calls[key] = one
                    self._take(one, part, samples, detached)
                if not one.returns:
                    return None
                given = (arguments, options) if _learns(metric) else detached
                value = _value(empty, given, self._names.get(index, ()))
                if isinstance(value, dict):
                    self._names[index] = tuple(value)
                for entry, tensor in value.items() if isinstance(value, dict) else [(None, value)]:
                    if isinstance(tensor, Tensor):
                        self._returned[tensor] = one, entry
                return value

            return call

        with self._replaced(stand_in):
            yield

    @contextmanager
    def saving_nothing(self) -> Iterator[None]:
        """A whole batch runs: metrics work as ever, and what they save is in no plan."""
        with self._replaced(lambda index, name: getattr(self._metrics[index][0], name)):
            yield

    def publish(self, samples: Sequence[int], weights_of: WeightsOf) -> None:
        """Give the metrics what they were not given yet, and let them show the batch's values.

        Args:
            samples: of each part.
            weights_of: a number among arguments, by its key, in these parts.
        """
        for call in self._calls.values():
            call.finish(samples, weights_of)

    @contextmanager
    def _replaced(self, method: Callable[[int, str], Callable[..., Any]]) -> Iterator[None]:
        with ExitStack() as around:
            for index, (metric, _) in enumerate(self._metrics):
                methods = {name: _saving_apart(method(index, name)) for name in ("forward", "update")}
                around.enter_context(replaced_attributes(metric, **methods))
            yield

    def _take(self, call: MetricCall, part: int, samples: int, given: Arguments) -> None:
        call.given[part] = given
        held = sum(tensor.nbytes for tensor in tensors_in(given))
        if call.total is None and (held <= _SMALL_BYTES * samples or _counts_calls(call.metric)):
            return
        self._passing_on = True
        try:
            call.pass_on()
        finally:
            self._passing_on = False


def metrics_of(module: nn.Module) -> list[AnyMetric]:
    """The metrics that a module's code may call: not those inside of other metrics."""
    found: dict[int, AnyMetric] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or not isinstance(value, nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, Metric | MetricCollection):
            found[id(value)] = value
        if isinstance(value, Metric):
            return
        for child in value.children():
            visit(child)
        for name, container in list(vars(value).items()):
            if isinstance(container, list | tuple | dict) and not name.startswith("_"):
                for child in container.values() if isinstance(container, dict) else container:
                    if isinstance(child, Metric | MetricCollection):
                        visit(child)

    visit(module)
    return list(found.values())


def _empty(metric: AnyMetric) -> AnyMetric:
    """A copy that counts this rank's samples only, whenever it is asked: ranks have different numbers of parts."""
    copied = copy.deepcopy(metric)
    for one in copied.modules():
        if isinstance(one, Metric):
            one.sync_on_compute = one.dist_sync_on_step = False
            sync_on_forward(one, False)
    copied.reset()
    return copied


def _computed(metric: AnyMetric, total: AnyMetric | None) -> Any:
    """The batch's value; over all ranks where the metric's ``forward`` gives that, with one exchange."""
    assert total is not None
    for asked, counted in zip(metric.modules(), total.modules(), strict=True):
        if isinstance(asked, Metric) and isinstance(counted, Metric):
            sync_on_forward(counted, asked.dist_sync_on_step)
    return total.compute()


def _show(metric: AnyMetric, total: Any) -> None:
    """Lightning logs a metric's last ``forward`` as the step's value."""
    if isinstance(metric, Metric):
        show_as_step_value(metric, total.compute())
        return
    for name, child in metric.items(keep_base=True, copy_state=False):
        _show(child, total[name])


def _value(empty: AnyMetric, given: Arguments, names: Sequence[str]) -> Any:
    """The value of these arguments alone; what is empty stays so.

    NaN where there is none: dry runs have no values for checks of inputs, and a part may be too small (a correlation
    of one sample). What is wrong with the whole batch is raised when the batch's value is made.

    Args:
        empty: a copy of the metric that counted nothing.
        given: arguments.
        names: of the values of a call before, which a value that is NaN has too.
    """
    try:
        with undisturbed(empty):
            empty.reset()  # in new tensors
            return empty(*given[0], **given[1])
    except Exception:  # whatever a metric says to its arguments
        nothing = torch.full((), math.nan)
        for tensor in tensors_in(given):
            if tensor.requires_grad:
                nothing = nothing + tensor.sum().to(nothing.device, nothing.dtype)
        names = [*map(str, empty.keys())] if isinstance(empty, MetricCollection) else names
        return dict.fromkeys(names, nothing) if names else nothing


def _saving_apart(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(ResidentTensor, ResidentTensor.get):
            return method(*arguments, **options)

    return call


def _learns(metric: AnyMetric) -> bool:
    """Whether a value may have a gradient."""
    return any(isinstance(one, Metric) and one.is_differentiable for one in metric.modules())


def _counts_calls(metric: AnyMetric) -> bool:
    return any(isinstance(one, Running) for one in metric.modules())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _by_name(given: Arguments) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(given[0])} | given[1]


def _joined(values: list[Any], samples: Sequence[int], weights_of: Callable[[str], Sequence[float]]) -> Any:
    """An argument for the whole batch, of what some parts gave; arguments as those of :func:`combined`.

    Raises:
        ValueError: the parts' arguments cannot be put together.
    """
    whole = combined(values, samples, weights_of)
    if isinstance(whole, list) and isinstance(values[0], Tensor):
        first = values[0]
        if any(value.dim() == 0 or value.shape[1:] != first.shape[1:] for value in values):
            raise ValueError("tensors of other shapes")
        return torch.cat(values)  # some of a part's samples, or several entries a sample
    return whole
