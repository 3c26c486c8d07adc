"""What a training step logs in a pipeline: for each micro-batch where the last stage is, and then on all ranks."""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from retime.mechanisms.no_effect import warn_difference
from retime.mechanisms.replaced_attributes import replaced_attributes
from retime.strategies.support.lightning_private import logging_as, metric_state, set_metric_state

__all__ = ["PipelineLog"]

_LOG = inspect.signature(LightningModule.log)
_METRIC = "metric"
_NEAR = 1e-3


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
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        return [_combined(found) for found in _numbers(calls, weights).values()], states

    def warn(self, whole: Sequence[dict[str, Any]], parts: Sequence[Sequence[dict[str, Any]]], weights: Any) -> None:
        """Say of each number, and each metric of a step, that micro-batches make another of it than a whole batch.

        Args:
            whole: what a batch logged.
            parts: what its micro-batches logged.
            weights: of their losses.
        """
        expected = dict(_numbered(whole))
        made = {key: _combined(found) for key, found in _numbers(parts, weights).items()}
        for key, call in expected.items():
            other = made.get(key)
            if _METRIC in call and call.get("on_step") is not False and len(parts) > 1:
                warn_difference(
                    f"the metric {call['name']!r} is logged in each step: what is shown there is its last "
                    "micro-batch's under a pipeline, and the epoch's value is that of all samples: log it with "
                    "on_step=False, on_epoch=True"
                )
            if _METRIC in call or other is None:
                continue
            there, here = float(call["value"]), float(other["value"])
            if not math.isclose(there, here, rel_tol=_NEAR, abs_tol=_NEAR) and not math.isnan(there):
                warn_difference(
                    f"the logged value {call['name']!r} is put together from micro-batches under a pipeline, and is "
                    f"not the whole batch's ({here:.4g} for {there:.4g} in the first batch): log a torchmetrics "
                    "object, or a mean over samples"
                )

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


_Key = tuple[str, int]
_Found = list[tuple[dict[str, Any], float]]


def _numbered(calls: Sequence[dict[str, Any]]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    """The n-th call with a name is another number than the first."""
    counted: Counter[str] = Counter()
    for call in calls:
        yield (call["name"], counted[call["name"]]), call
        counted[call["name"]] += 1


def _numbers(calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float]) -> dict[_Key, _Found]:
    numbers: dict[_Key, _Found] = {}
    for micro_batch, weight in zip(calls, weights, strict=True):
        for key, call in _numbered(micro_batch):
            numbers.setdefault(key, []).append((call, weight))
    return numbers


def _combined(found: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    """One call for those of the same name in all micro-batches."""
    call = dict(found[0][0])
    sizes = [one.get("batch_size") for one, _ in found]
    if all(size is not None for size in sizes):
        call["batch_size"] = sum(sizes)
    if _METRIC in call or len(found) == 1:
        return call
    given = [torch.as_tensor(one["value"]).cpu().squeeze() for one, _ in found]
    values = torch.stack([value.double() for value in given])
    reduce = call.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    weights = torch.tensor([weight for _, weight in found], dtype=torch.float64)
    if name == "sum":
        call["value"] = values.sum()
    elif name in ("max", "amax"):
        call["value"] = values.max()
    elif name in ("min", "amin"):
        call["value"] = values.min()
    else:
        counts = weights != 0  # a loss over nothing has no value
        call["value"] = (values * weights)[counts].sum() / weights.sum()
    kind = given[0].dtype if given[0].is_floating_point() else torch.get_default_dtype()
    call["value"] = call["value"].to(kind)
    return call
