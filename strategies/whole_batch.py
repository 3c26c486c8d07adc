"""Where sub-batches ran, what `training_step` logs and returns for parts is put together before others see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from retime.mechanisms.memory.combine import combined_scalar
from retime.mechanisms.memory.sub_batches import SubBatches

LOGGED = "logged"
"""Under this key a step returns what it logged, so that a certificate learns how each number adds up."""


class PartLog:
    """Takes the place of a module's ``log`` while the parts of a batch run, and logs once for the batch.

    Numbers are added up as their certificate says, by samples where it says nothing. A torchmetrics object is logged
    as it is: it has counted every part by itself.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: dict[str, tuple[dict[str, Any], list[Any]]] = {}

    def clear(self) -> None:
        self._calls = {}

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Any]]:
        """While open, nothing is logged; yields what was, by name, for the step's output."""
        own = self._module.__dict__
        numbers: dict[str, Any] = {}

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_ARGUMENTS, arguments, strict=False))
            _, values = self._calls.setdefault(name, (options, []))
            values.append(value.detach() if isinstance(value, Tensor) else value)
            if not isinstance(value, Metric | MetricCollection):
                numbers[name] = values[-1]

        def log_dict(dictionary: Any, *arguments: Any, **options: Any) -> None:
            options |= dict(zip(_LOG_DICT_ARGUMENTS, arguments, strict=False))
            for name, value in dictionary.items():
                log(name, value, **options)

        own["log"], own["log_dict"] = log, log_dict
        try:
            yield numbers
        finally:
            own.pop("log", None)
            own.pop("log_dict", None)

    def publish(self, parts: SubBatches) -> None:
        """Log each name once, as ``training_step`` would have for the whole batch."""
        module, calls = self._module, self._calls
        self._calls = {}
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            for name, (options, values) in calls.items():
                value = values[0]
                if not isinstance(value, Metric | MetricCollection) and len(values) == len(parts) > 1:
                    value = combined_scalar(values, parts.weights_of(f"output['{LOGGED}']['{name}']"))
                options.setdefault("batch_size", sum(parts.samples))
                if options["batch_size"] is None or len(parts) > 1:
                    options["batch_size"] = sum(parts.samples)
                module.log(name, value, **options)
        finally:
            module._current_fx_name = before


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

        self._loop.output_result_cls = Result  # type: ignore[misc]

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
