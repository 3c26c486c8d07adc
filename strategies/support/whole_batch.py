"""Where sub-batches ran, what `training_step` logs and returns for parts is put together before others see it."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from retime.mechanisms.memory.step import SubBatches
from retime.mechanisms.no_effect import NoEffectWarning
from retime.strategies.support.lightning_private import logging_as
from retime.strategies.support.part_metrics import ARGUMENT, PartMetrics
from retime.strategies.support.part_numbers import LOGGED, LoggedCall, LoggedNumber, is_number, said

__all__ = ["LOGGED", "PartLog", "WholeBatchResults"]


class PartLog:
    """Takes the place of a module's ``log`` while the parts of a batch run, and logs once for the batch.

    Each call of ``training_step`` is logged, the n-th with a name for the n-th of all parts. Numbers are added up as
    their certificate says, by the ``batch_size`` or samples where it says nothing, which is warned of
    (:class:`LoggedCall`). Torchmetrics objects count and show the whole batch, see :class:`PartMetrics`.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = PartMetrics(module)
        self._begun = 0
        self._calls: dict[tuple[str, int], LoggedCall] = {}
        self._collections: list[tuple[MetricCollection, dict[str, Any]]] = []
        self._numbers: dict[str, LoggedNumber] = {}
        self._doubts: dict[str, str] = {}
        self._warned: set[str] = set()

    def clear(self) -> None:
        self._begun = 0
        self._calls = {}
        self._collections = []
        self._metrics.clear()

    @contextmanager
    def collecting(self, samples: int, *, dry: bool, whole: bool) -> Iterator[dict[str, Any]]:
        """While open, nothing is logged; yields numbers by key, for the step's output.

        Args:
            samples: of the part.
            dry: the part is only tried out. Only then numbers are yielded: a certificate is given for what they say,
                and :meth:`publish` puts together those of real parts, of which some may log what others do not.
            whole: it is the whole batch: its metrics need no help.
        """
        own = self._module.__dict__
        numbers: dict[str, Any] = {}
        metrics = self._metrics
        part = self._begun
        self._begun += not dry
        counted: Counter[str] = Counter()

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_ARGUMENTS, arguments, strict=False))
            number = LoggedNumber.of(name, counted[name], options)
            counted[name] += 1
            made = metrics.key_of(value)
            value = _Made(made) if made is not None else _as_it_is(value)
            size = _as_it_is(options.pop("batch_size", None))
            if dry:
                numbers.update(number.probed(value, size, samples) if is_number(value) else {})
            else:
                call = self._calls.setdefault((name, number.call), LoggedCall(number, options))
                call.put(part, value, size)
            self._numbers[number.key] = number

        def log_dict(dictionary: Any, *arguments: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_DICT_ARGUMENTS, arguments, strict=False))
            if isinstance(dictionary, MetricCollection):
                if not dry and all(known is not dictionary for known, _ in self._collections):
                    self._collections.append((dictionary, options))
                return
            for name, value in dictionary.items():
                log(name, value, **options)

        own["log"], own["log_dict"] = log, log_dict
        try:
            with metrics.collecting(samples, numbers, part=part, dry=dry, whole=whole):
                yield numbers
            if not dry:
                numbers.clear()
        finally:
            own.pop("log", None)
            own.pop("log_dict", None)

    def publish(self, parts: SubBatches) -> None:
        """Log what ``training_step`` would have logged for the whole batch, in its order."""
        module, calls, collections = self._module, self._calls, self._collections
        try:
            with logging_as(module, "training_step"):
                self._metrics.publish(parts)
                for call in calls.values():
                    module.log(call.number.name, self._value(call, parts), **call.options, batch_size=call.size(parts))
                for collection, options in collections:
                    module.log_dict(collection, **options)
        finally:
            self.clear()

    def _value(self, call: LoggedCall, parts: SubBatches) -> Any:
        for value in call.values.values():
            if isinstance(value, Metric):
                return value
            if isinstance(value, _Made):
                return self._metrics.value_of(value.key)
        value, doubt = call.value(parts)
        if doubt:
            self._doubts.setdefault(call.number.place, doubt)
        return value

    def warn(self, parts: SubBatches) -> None:
        """Say once of each number that it may not be the whole batch's."""
        for place in sorted((parts.guessed | self._doubts.keys()) - self._warned):
            text = self._doubt(place, parts)
            if text:
                self._warned.add(place)
                warnings.warn(
                    f"under a memory budget {text}. Log a torchmetrics object for it: self.log(name, metric)",
                    NoEffectWarning,
                    stacklevel=2,
                )

    def _doubt(self, place: str, parts: SubBatches) -> str:
        """What to say of a place that a certificate leaves open; nothing where that does not matter."""
        if place in self._doubts:
            return f"{_called(place)} {self._doubts[place]}"
        for number in self._numbers.values():
            if place == number.place:
                certain = number.certified(parts.certificate) or number.was_zero(parts.certificate)
                return "" if certain else f"{_called(place)} {said(number.how(parts.certificate))}"
            if place == number.size_place:
                known = number.size_certified(parts.certificate)
                matters = number.by_epoch and not known and number.certified(parts.certificate)
                return f"{_called(number.place)} {_SIZE_IN_DOUBT}" if matters else ""
            if place in number.helpers:
                return ""
        return f"{_called(place)} {said('samples')}"


_SIZE_IN_DOUBT = (
    "has the sum of the sub-batches' batch_size as its weight in an epoch's mean: they did not add up to the whole's"
)


@dataclass(frozen=True)
class _Made:
    """A value that a metric returned for a part; the key finds the batch's."""

    key: Any


def _as_it_is(value: Any) -> Any:
    """As Lightning does: the step may change the tensor after it has logged it."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.squeeze() if copied.numel() == 1 else copied


def _called(place: str) -> str:
    logged = f"output['{LOGGED}']["
    if place.startswith(f"{logged}'{ARGUMENT}"):
        return f"a number that training_step gives to a metric ({place.removeprefix(logged).removesuffix(']')})"
    if place.startswith(logged):
        return f"the logged value {place.removeprefix(logged).removesuffix(']')}"
    return f"what training_step returns as {place.removeprefix('output')}"


class WholeBatchResults:
    """Lets callbacks see the loss and the outputs of the whole batch, which are known after backward.

    So does the optimizer, which may read the loss that its closure returns: LBFGS searches by it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._whole: dict[str, Any] | None = None
        self._result: ClosureResult | None = None
        taken, made = self._take, self._made

        class Result(ClosureResult):
            def __post_init__(self) -> None:
                super().__post_init__()
                made(self)

            def asdict(self) -> dict[str, Any]:
                whole = taken()
                return super().asdict() if whole is None else whole

        self._loop.output_result_cls = _Results(Result)  # type: ignore[assignment]

    def put(self, output: Any, accumulated: int) -> None:
        """What ``training_step`` would have returned; ``accumulated``: batches that its loss is divided by."""
        whole = dict(output) if isinstance(output, dict) else {"loss": output}
        whole["loss"] = whole["loss"] / accumulated
        self._whole = whole
        result, self._result = self._result, None
        if result is not None:
            result.loss = whole["loss"]

    def remove(self) -> None:
        self._loop.__dict__.pop("output_result_cls", None)

    def _made(self, result: ClosureResult) -> None:
        self._result = result

    def _take(self) -> dict[str, Any] | None:
        whole, self._whole = self._whole, None
        return whole


class _Results:
    """Makes a loop's results; a copy of the loop has Lightning's class again, as nobody puts whole batches there."""

    def __init__(self, kind: type[ClosureResult]) -> None:
        self._kind = kind

    def from_training_step_output(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._kind.from_training_step_output(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _lightnings_results, ()


def _lightnings_results() -> type[ClosureResult]:
    return ClosureResult


def _names(function: Callable[..., Any], skip: int) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[skip:]


_LOG_ARGUMENTS = _names(LightningModule.log, 3)
_LOG_DICT_ARGUMENTS = _names(LightningModule.log_dict, 2)
