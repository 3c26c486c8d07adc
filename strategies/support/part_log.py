"""Where sub-batches ran, what `training_step` logs for parts is put together and logged once for the batch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from retime.foundations.messages import warn_difference
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.memory_budget import SubBatches
from retime.strategies.support.lightning_private import logging_as
from retime.strategies.support.metric_calls import (
    LOGGED,
    LoggedNumber,
    MetricCall,
    MetricCalls,
    fitting,
    is_number,
    place_of,
    shares,
)

_LOG = inspect.signature(LightningModule.log)


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
