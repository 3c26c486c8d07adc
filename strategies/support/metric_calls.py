"""Where sub-batches ran, torchmetrics objects count and show one batch, not its parts."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running

from retime.foundations.parts import combined
from retime.foundations.patching import replaced_attributes
from retime.foundations.preserve_state import preserve_state
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private.engine import tree_map
from retime.mechanisms.memory_budget import ResidentTensor
from retime.strategies.support.lightning_private import show_as_step_value, sync_on_forward

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
        """Call that returned this very value for a part, and the name under which it did; None if none did."""
        return self._returned.get(value) if isinstance(value, Tensor) else None

    @contextmanager
    def collecting(self, samples: int, numbers: dict[str, Any], part: int | None) -> Iterator[None]:
        """One part runs.

        Args:
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
        nbytes = sum(tensor.nbytes for tensor in tensors_in(given))
        if call.total is None and (nbytes <= _SMALL_BYTES * samples or _counts_calls(call.metric)):
            return
        self._passing_on = True
        try:
            call.pass_on()
        finally:
            self._passing_on = False


def metrics_of(module: nn.Module) -> list[AnyMetric]:
    """The metrics that a module's code may call: not those inside of other metrics."""
    metrics: dict[int, AnyMetric] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or not isinstance(value, nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, Metric | MetricCollection):
            metrics[id(value)] = value
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
    return list(metrics.values())


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
        names: of the values of a call before, which a value that is NaN has too.
    """
    try:
        with preserve_state(empty):
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
    """Return whether a value may have a gradient."""
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
