"""Where sub-batches ran, torchmetrics objects count and show one batch, not its parts."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running

from retime.mechanisms.memory.batches import combined
from retime.mechanisms.memory.offload import Kept
from retime.mechanisms.memory.sandbox import undisturbed
from retime.mechanisms.memory.step import SubBatches
from retime.mechanisms.storages import tensors_in
from retime.mechanisms.torch_private import tree_map
from retime.strategies.support.lightning_private import show_as_step_value, sync_on_forward
from retime.strategies.support.part_numbers import place_of, shares

ARGUMENT = "argument of metric"
"""Names of numbers that metrics are given begin so."""

Unit: TypeAlias = Metric | MetricCollection

_SMALL_BYTES = 64
"""Arguments of a call that take no more a sample are kept until the batch is complete."""


@dataclass
class _Call:
    """One call in ``training_step``: what each part gave it, and which parts they were."""

    unit: Unit
    number: int
    shows: bool = False
    """It was ``forward``, so there is a value of the batch."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    passed_on: bool = False
    """Parts went to the metric as they came."""
    total: Unit | None = None
    """Empty before the batch: computes its value."""
    value: Any = None


class PartMetrics:
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
        self._units = [(unit, _empty(unit)) for unit in metrics_of(module)]
        self._calls: dict[tuple[int, int], _Call] = {}
        self._position: dict[int, int] = {}
        self._through = False
        self._returned: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], str | None]] = {}

    def clear(self) -> None:
        """Forget the batch."""
        self._calls = {}
        self._returned = {}

    @contextmanager
    def collecting(
        self, samples: int, numbers: dict[str, Any], *, part: int, dry: bool, whole: bool = False
    ) -> Iterator[None]:
        """One part runs.

        Args:
            samples: of the part.
            numbers: takes scalar arguments by name, so that a certificate learns how they add up.
            part: its number.
            dry: the part is only tried out: nothing is kept.
            whole: it is the whole batch: metrics work as ever.
        """
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._position = {}
        try:
            for number, (unit, _) in enumerate(self._units):
                own = unit.__dict__
                before.append((own, {name: own[name] for name in ("forward", "update") if name in own}))
                self._position[number] = 0
                for name in ("forward", "update"):
                    if whole:
                        own[name] = _apart(getattr(unit, name))
                    else:
                        own[name] = _apart(self._stand_in(name, number, samples, numbers, part, dry))
            yield
        finally:
            for own, held in before:
                for name in ("forward", "update"):
                    own.pop(name, None)
                own.update(held)

    def key_of(self, value: Any) -> Any:
        """Which call returned this very value in the part that runs; None if none did."""
        found = self._returned.get(id(value))
        return None if found is None or found[0]() is not value else found[1:]

    def value_of(self, key: tuple[tuple[int, int], str | None]) -> Any:
        """What that call would have returned for the whole batch; after :meth:`publish`."""
        value = self._calls[key[0]].value
        return value if key[1] is None else value[key[1]]

    def publish(self, parts: SubBatches) -> None:
        """Give the metrics what they were not given yet, and let them show the batch's values."""
        for call in self._calls.values():
            whole = None if call.passed_on else self._whole(call, parts)
            if whole is not None:
                method: Callable[..., Any] = call.unit if call.shows else call.unit.update
                call.value = method(*whole[0], **whole[1])
                continue
            for arguments, options in call.given:
                self._pass_on(call, call.unit.update, arguments, options)
            if call.shows and call.total is not None:
                call.value = _computed(call.unit, call.total)
                _show(call.unit, call.total)

    def _stand_in(
        self, name: str, number: int, samples: int, numbers: dict[str, Any], part: int, dry: bool
    ) -> Callable[..., Any]:
        unit, empty = self._units[number]
        real, real_update = getattr(unit, name), unit.update

        def call(*arguments: Any, **options: Any) -> Any:
            if self._through:  # a collection that is updated updates its metrics
                return real(*arguments, **options)
            place = number, self._position[number]
            self._position[number] += 1
            with_graph = (arguments, options)
            arguments, options = tree_map(_detached, with_graph)
            seen = with_graph if _learns(unit) else (arguments, options)
            numbers.update(_scalars(place, arguments, options))
            if dry:
                value = _value(empty, *seen) if name == "forward" else None
                self._note(place, value)
                return value
            known = self._calls.setdefault(place, _Call(unit, number, name == "forward"))
            held = sum(tensor.nbytes for tensor in tensors_in([arguments, options]))
            if not known.passed_on and (held <= _SMALL_BYTES * samples or _counts_calls(unit)):
                known.given.append((arguments, options))
                known.which.append(part)
                value = _value(empty, *seen) if known.shows else None
            else:
                earlier, known.given, known.passed_on = known.given, [], True
                for before in earlier:
                    self._pass_on(known, real_update, *before)
                value = self._pass_on(known, real_update, arguments, options)
                if _learns(unit) and known.shows:
                    value = _value(empty, *seen)
            self._note(place, value)
            return value if known.shows else None

        return call

    def _pass_on(
        self, call: _Call, update: Callable[..., None], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The metric and the batch's copy see a part; returns the part's value."""
        self._through = True
        try:
            update(*arguments, **options)
        finally:
            self._through = False
        if not call.shows:
            return None
        if call.total is None:
            call.total = copy.deepcopy(self._units[call.number][1])
        return call.total(*arguments, **options)

    def _note(self, place: tuple[int, int], value: Any) -> None:
        values = value.items() if isinstance(value, dict) else [(None, value)]
        for name, one in values:
            if isinstance(one, Tensor):
                self._returned[id(one)] = (weakref.ref(one), place, name)  # it may have a graph

    def _whole(self, call: _Call, parts: SubBatches) -> tuple[list[Any], dict[str, Any]] | None:
        """One call's arguments for the batch; None where they cannot be put together."""
        place = next(place for place, one in self._calls.items() if one is call)
        try:
            joined = [
                _joined([_named(*given)[name] for given in call.given], parts, call.which, _key(place, name))
                for name in _named(*call.given[0])
            ]
        except (KeyError, ValueError):
            return None
        names = list(_named(*call.given[0]))
        count = len(call.given[0][0])
        return joined[:count], dict(zip(names[count:], joined[count:], strict=True))


def metrics_of(module: nn.Module) -> list[Unit]:
    """The metrics that a module's code may call: not those inside of other metrics."""
    found: dict[int, Unit] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Metric | MetricCollection):
            if id(value) in found:
                return
            found[id(value)] = value
            if isinstance(value, Metric):
                return
        if isinstance(value, nn.Module):
            if id(value) in seen:
                return
            seen.add(id(value))
            for child in value.children():
                visit(child)
            for name, held in list(value.__dict__.items()):
                if isinstance(held, list | tuple | dict) and not name.startswith("_"):
                    visit(held)
        elif isinstance(value, list | tuple | dict):
            for child in value.values() if isinstance(value, dict) else value:
                if isinstance(child, Metric | MetricCollection):
                    visit(child)

    seen: set[int] = set()
    visit(module)
    return list(found.values())


def _empty(unit: Unit) -> Unit:
    """A copy that counts this rank's samples only, whenever it is asked: ranks have different numbers of parts."""
    made = copy.deepcopy(unit)
    for metric in made.modules():
        if isinstance(metric, Metric):
            metric.sync_on_compute = metric.dist_sync_on_step = False
            sync_on_forward(metric, False)
    made.reset()
    return made


def _computed(unit: Unit, total: Unit) -> Any:
    """The batch's value; over all ranks where the metric's ``forward`` gives that, with one exchange."""
    for asked, made in zip(unit.modules(), total.modules(), strict=True):
        if isinstance(asked, Metric) and isinstance(made, Metric):
            sync_on_forward(made, asked.dist_sync_on_step)
    return total.compute()


def _value(empty: Unit, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The value of these arguments alone; what is empty stays so.

    NaN where there is none: dry runs have no values for checks of inputs, and a part may be too small (a correlation
    of one sample). What is wrong with the whole batch is raised when the batch's value is made.
    """
    try:
        with undisturbed(empty):
            empty.reset()  # in new tensors
            return empty(*arguments, **options)
    except Exception:  # whatever a metric says to its arguments
        made = torch.full((), math.nan)
        for tensor in tensors_in([arguments, options]):
            if tensor.requires_grad:
                made = made + tensor.sum().to(made.device, made.dtype)
        return dict.fromkeys(map(str, empty.keys()), made) if isinstance(empty, MetricCollection) else made


def _apart(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(Kept, Kept.get):
            return method(*arguments, **options)

    return call


def _learns(unit: Unit) -> bool:
    """Whether a value may have a gradient."""
    return any(isinstance(module, Metric) and module.is_differentiable for module in unit.modules())


def _show(unit: Unit, total: Unit) -> None:
    """Lightning logs a metric's last ``forward`` as the step's value."""
    if isinstance(unit, Metric):
        assert isinstance(total, Metric)
        show_as_step_value(unit, total.compute())
        return
    assert isinstance(total, MetricCollection)
    for name, child in unit.items(keep_base=True, copy_state=False):
        _show(child, total[name])


def _counts_calls(unit: Unit) -> bool:
    return any(isinstance(module, Running) for module in unit.modules())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(arguments)} | options


def _key(place: tuple[int, int], name: str) -> str:
    return f"{ARGUMENT} {place[0]}.{place[1]}.{name}"


def _scalars(place: tuple[int, int], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {
        _key(place, name): value
        for name, value in _named(arguments, options).items()
        if (isinstance(value, Tensor) and value.dim() == 0) or type(value) in (int, float)
    }


def _joined(values: list[Any], parts: SubBatches, which: list[int], key: str) -> Any:
    """An argument for the whole batch, of what these parts gave.

    Raises:
        ValueError: the parts' arguments cannot be put together.
    """
    samples = [parts.samples[part] for part in which]
    whole = combined(values, samples, lambda _: _weights(parts, which, place_of(key)))
    if isinstance(whole, list) and isinstance(values[0], Tensor):
        first = values[0]
        if any(value.dim() == 0 or value.shape[1:] != first.shape[1:] for value in values):
            raise ValueError("tensors of other shapes")
        return torch.cat(values)  # some of a part's samples, or several entries a sample
    return whole


def _weights(parts: SubBatches, which: list[int], place: str) -> list[float]:
    weights, complete = shares(parts, place, which)
    if not complete:
        parts.guessed.add(place)
    return weights
