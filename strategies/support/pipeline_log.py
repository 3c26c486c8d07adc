"""What a training step logs in a pipeline: for each micro-batch where the last stage is, and then on all ranks."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from retime.mechanisms.replaced_attributes import replaced_attributes
from retime.strategies.support.lightning_private import logging_as, metric_state, set_metric_state

__all__ = ["PipelineLog"]

_LOG = inspect.signature(LightningModule.log)
_METRIC = "metric"


class PipelineLog:
    """Takes the place of a module's ``log`` while micro-batches run.

    A number is logged once for the batch: the mean over micro-batches, weighed as their losses; with a ``reduce_fx`` of
    sum, max or min theirs. Torchmetrics objects have seen all micro-batches; their states go to all ranks.

    Args:
        module: whose metrics are not those of other modules.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._here = threading.local()
        self._metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        self._counts: dict[str, int] = {}

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

    def collected(self, calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float]) -> Any:
        """What other ranks are to be told: calls put together, and metrics that have changed.

        Args:
            calls: of each micro-batch.
            weights: of their losses.
        """
        numbers: dict[tuple[str, int], list[tuple[dict[str, Any], float]]] = {}
        for micro_batch, weight in zip(calls, weights, strict=True):
            counted: Counter[str] = Counter()
            for call in micro_batch:
                numbers.setdefault((call["name"], counted[call["name"]]), []).append((call, weight))
                counted[call["name"]] += 1
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        return [_combined(found) for found in numbers.values()], states

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


def _combined(found: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    """One call for those of the same name in all micro-batches."""
    call = dict(found[0][0])
    sizes = [one.get("batch_size") for one, _ in found]
    if all(size is not None for size in sizes):
        call["batch_size"] = sum(sizes)
    if _METRIC in call or len(found) == 1:
        return call
    values = torch.stack([torch.as_tensor(one["value"], dtype=torch.float32).cpu().squeeze() for one, _ in found])
    reduce = call.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    weights = torch.tensor([weight for _, weight in found])
    if name == "sum":
        call["value"] = values.sum()
    elif name in ("max", "amax"):
        call["value"] = values.max()
    elif name in ("min", "amin"):
        call["value"] = values.min()
    else:
        call["value"] = (values * weights).sum() / weights.sum()
    return call
