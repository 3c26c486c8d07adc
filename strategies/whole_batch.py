"""Where sub-batches ran, what `training_step` logs and returns for parts is put together before others see it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from retime.mechanisms.memory.combine import combined_scalar
from retime.mechanisms.memory.sub_batches import SubBatches
from retime.mechanisms.no_effect import NoEffectWarning
from retime.strategies.part_metrics import ARGUMENT, PartMetrics

LOGGED = "logged"
"""Under this key a step returns what it logged, so that a certificate learns how each number adds up."""


class PartLog:
    """Takes the place of a module's ``log`` while the parts of a batch run, and logs once for the batch.

    Numbers are added up as their certificate says, by samples where it says nothing, which is warned of. Torchmetrics
    objects count and show the whole batch, see :class:`PartMetrics`.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = PartMetrics(module)
        self._calls: dict[str, tuple[dict[str, Any], list[Any]]] = {}
        self._collections: list[tuple[MetricCollection, dict[str, Any]]] = []
        self._warned: set[str] = set()

    def clear(self) -> None:
        self._calls = {}
        self._collections = []
        self._metrics.clear()

    @contextmanager
    def collecting(self, samples: int, *, dry: bool, whole: bool) -> Iterator[dict[str, Any]]:
        """While open, nothing is logged; yields what was, by name, for the step's output.

        Args:
            samples: of the part.
            dry: the part is only tried out.
            whole: it is the whole batch: its metrics need no help.
        """
        own = self._module.__dict__
        numbers: dict[str, Any] = {}
        metrics = self._metrics
        calls: dict[str, tuple[dict[str, Any], list[Any]]] = {} if dry else self._calls

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_ARGUMENTS, arguments, strict=False))
            _, values = calls.setdefault(name, (options, []))
            made = metrics.key_of(value)
            if made is not None:
                values.append(_Made(made))
                return
            values.append(value.detach() if isinstance(value, Tensor) else value)
            if not isinstance(value, Metric):
                numbers[name] = values[-1]

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
            with metrics.collecting(samples, numbers, dry=dry, whole=whole):
                yield numbers
        finally:
            own.pop("log", None)
            own.pop("log_dict", None)

    def publish(self, parts: SubBatches) -> None:
        """Log each name once, as ``training_step`` would have for the whole batch."""
        module, calls, collections = self._module, self._calls, self._collections
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            self._metrics.publish(parts)
            for name, (options, values) in calls.items():
                value = values[0]
                if isinstance(value, _Made):
                    value = self._metrics.value_of(value.key)
                elif not isinstance(value, Metric) and len(values) == len(parts) > 1:
                    value = combined_scalar(values, parts.weights_of(f"output['{LOGGED}']['{name}']"))
                module.log(name, value, **self._sized(options, parts))
            for collection, options in collections:
                module.log_dict(collection, **self._sized(options, parts))
        finally:
            module._current_fx_name = before
            self.clear()

    def warn(self, parts: SubBatches) -> None:
        """Say once of each number that it may not be the whole batch's."""
        for place in sorted(parts.guessed - self._warned):
            self._warned.add(place)
            warnings.warn(
                f"under a memory budget {_called(place)} is the mean over sub-batches, weighed by samples: no sum of "
                "their values gave the whole batch's. Log a torchmetrics object for it: self.log(name, metric)",
                NoEffectWarning,
                stacklevel=2,
            )

    @staticmethod
    def _sized(options: dict[str, Any], parts: SubBatches) -> dict[str, Any]:
        """With several parts, what training_step took for the batch's size was a part's."""
        if options.get("batch_size") is None or len(parts) > 1:
            options["batch_size"] = sum(parts.samples)
        return options


@dataclass(frozen=True)
class _Made:
    """A value that a metric returned for a part; the key finds the batch's."""

    key: Any


def _called(place: str) -> str:
    logged = f"output['{LOGGED}']["
    if place.startswith(f"{logged}'{ARGUMENT}"):
        return f"a number that training_step gives to a metric ({place.removeprefix(logged).removesuffix(']')})"
    if place.startswith(logged):
        return f"the logged value {place.removeprefix(logged).removesuffix(']')}"
    return f"what training_step returns as {place.removeprefix('output')}"


class WholeBatchResults:
    """Lets the Trainer's callbacks see the loss and the outputs of the whole batch, which are known after backward."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._whole: dict[str, Any] | None = None
        taken = self._take

        class Result(ClosureResult):
            def asdict(self) -> dict[str, Any]:
                whole = taken()
                return super().asdict() if whole is None else whole

        self._loop.output_result_cls = Result

    def put(self, output: Any, accumulated: int) -> None:
        """What ``training_step`` would have returned; ``accumulated``: batches that its loss is divided by."""
        whole = dict(output) if isinstance(output, dict) else {"loss": output}
        whole["loss"] = whole["loss"] / accumulated
        self._whole = whole

    def remove(self) -> None:
        self._loop.__dict__.pop("output_result_cls", None)

    def _take(self) -> dict[str, Any] | None:
        whole, self._whole = self._whole, None
        return whole


def _names(function: Callable[..., Any], skip: int) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[skip:]


_LOG_ARGUMENTS = _names(LightningModule.log, 3)
_LOG_DICT_ARGUMENTS = _names(LightningModule.log_dict, 2)
