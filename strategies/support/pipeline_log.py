"""What `training_step` logs for micro-batches of a pipeline is put together and logged once, on all ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator

from retime.foundations.messages import warn_difference
from retime.foundations.parts import Example, NotUnderstoodError, loss_of
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.pipeline import Examples, FirstLook, LossWeights
from retime.strategies.support.lightning_private import logging_as, metric_state, set_metric_state
from retime.strategies.support.parts_log import (
    LOGGED,
    By,
    Calls,
    LoggedCall,
    Number,
    are_numbers,
    numbers_of,
    of_some,
    record,
    whole_number,
)

_NEAR, _LOW_PRECISION = 1e-5, 3e-2
"""Relative to the largest of the numbers, as layers compute in 32 bits or in 16."""
_SHARE = 1e-5
_SAME = 1e-9
_WAYS: tuple[By, ...] = ("weights", "samples", "sum")
"""How numbers without a reduction of their own may be put together."""


class _MetricPath(str):
    """Path to a logged metric on the module, of which each rank has its own."""


class PipelineLog:
    """Takes the place of a module's ``log`` while micro-batches run.

    A number is logged once for the batch: those of micro-batches, weighed as their losses, by samples, or added up, as
    its operations tell and the first batch agrees; with a ``reduce_fx`` of sum, max or min theirs. Torchmetrics objects
    have seen all micro-batches; their states go to all ranks.

    Args:
        module: whose metrics are not those of other modules.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._here = threading.local()
        self._metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        self._counts: dict[str, int] = {}
        self._ways: dict[str, By] = {}
        self._either: set[str] = set()  # by samples, as long as losses are weighed by samples too
        self._fallback: By = "weights"
        self._partial: set[str] = set()  # of which it is said that some micro-batches only log it

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around all micro-batches of a batch."""
        self._counts = {name: metric.update_count for name, metric in self._metrics.items()}
        log_dict = partial(LightningModule.log_dict, self._module)  # muted where steps are tried out, as log is
        with replaced_attributes(self._module, log=self._log, log_dict=log_dict):
            yield

    @contextmanager
    def micro_batch(self) -> Iterator[Calls]:
        """Around one of them, in its thread; yields what it logs, which the step is to return as ``LOGGED``."""
        calls: Calls = {}
        self._here.calls = calls
        try:
            yield calls
        finally:
            self._here.calls = None

    def collected(self, calls: Sequence[Calls], weights: Sequence[float], samples: Sequence[int]) -> Any:
        """Message for other ranks: calls put together, and metrics that have changed."""
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        batch = Example({}, (), tuple(samples), tuple(weights))
        if any(abs(weight - size / sum(samples)) > _SAME for weight, size in zip(weights, samples, strict=True)):
            for key in self._either:
                warn_difference(
                    f"the logged value {key!r} may be a mean over samples or over what the loss is a mean over. In the "
                    "first batch both were the same, and in this one they are not: a pipeline takes it as a mean over "
                    "samples from now on. Log a tensor, which shows what it is, in place of a Python number",
                    every_rank=True,  # only the last stage's knows
                )
            self._either.clear()
        return [self._whole(key, number, batch) for key, number in numbers_of(calls).items()], states

    def _whole(self, key: str, number: Number, batch: Example) -> LoggedCall:
        """One call for those of all micro-batches."""
        call = next(iter(number.values()))
        size = sum(one.size for one in number.values()) if all(one.sized for one in number.values()) else None
        if len(batch.samples) == 1 or not are_numbers(number):
            return replace(call, size=size)
        alike = len({float(one.value) for one in number.values()}) == 1
        if key not in self._ways and call.reduced is None and not alike:
            self._ways[key] = self._fallback
            warn_difference(
                f"the logged value {key!r} was not logged in the first batch, from which a pipeline learns how to "
                "combine the values of micro-batches: it is taken as a mean over what the loss is a mean over, or over "
                "samples if the loss is a sum. Log it in each batch, or a torchmetrics object, which sees all samples",
                every_rank=True,  # only the last stage's knows
            )
        by = self._ways.get(key, call.assumed)
        value, complete = whole_number(by, number, batch)
        some_only = len(number) < len(batch.samples) and (by == "batch_size" or not complete)
        if some_only and key not in self._partial:
            self._partial.add(key)
            warn_difference(
                f"the logged value {key!r} {of_some(by, 'micro-batches')}. Log it in each of them, or a torchmetrics "
                "object, which sees all samples",
                every_rank=True,  # only the last stage's knows
            )
        return replace(call, size=size, value=value.cpu() if isinstance(value, Tensor) else value)

    def look(self, look: FirstLook, weights: LossWeights) -> None:
        """See how each number of the first batch is to be put together, and say of which there is no way to."""
        if {one.kind for one in weights.weightings} == {"sum"}:
            self._fallback = "samples"
        outputs = [*(one.whole for one in look.examples), *(run.output for run in look.runs)]
        for key, call in outputs[0][LOGGED].items() if outputs else ():
            if isinstance(call.value, _MetricPath):
                if call.options.get("on_step") is not False:
                    warn_difference(
                        f"the metric {call.name!r} is logged in each step: under a pipeline that is the value of the "
                        "step's last micro-batch, while the epoch's value counts all samples. Log it with "
                        "on_step=False, on_epoch=True"
                    )
                continue
            self._ways[key], why = self._way(look, weights, call)
            if why:
                warn_difference(
                    f"the logged value {key!r} is combined from micro-batches under a pipeline, and is not the "
                    f"whole batch's: {why}. Log the means or sums over samples that it is computed from, or a "
                    "torchmetrics object, which sees all samples"
                )

    def _way(self, look: FirstLook, weights: LossWeights, call: LoggedCall) -> tuple[By, str]:
        """Way in which a number is put together, and why that is not the whole batch's."""
        key, ways = call.key, (call.reduced,) if call.reduced else _WAYS
        fallback = call.reduced or self._fallback
        try:
            head = look.head_of(lambda output: getattr(output[LOGGED].get(key), "value", None))
        except NotUnderstoodError as error:
            if call.reduced in (None, "sum"):
                return fallback, f"it is no mean or sum over samples ({error})"
            head = None
        if head is not None and ways == _WAYS:
            kinds = {one.kind for one in head.weightings}
            if head.like_loss or (kinds and set(head.weightings) <= set(weights.weightings)):
                ways = ("weights",)
            elif kinds in ({"mean"}, {"sum"}):
                ways = ("samples",) if kinds == {"mean"} else ("sum",)
            elif kinds:
                return "weights", f"it is a {head.weightings[0]}, and the loss is not"
        misfits = {by: _misfit(by, key, look) for by in ways}
        share_of_loss = _is_share_of_loss(key, look.examples) if ways == _WAYS else False
        if ways == _WAYS and head is None:
            unlike = len(look.examples) > 1 and any(len(_values(key, _counted(one))) > 1 for one in look.examples)
            if not unlike and _is_read(key, look) and not share_of_loss:
                return fallback, "it is a Python number, and the first batch's micro-batches do not show what it is"
        alike = all(len(_values(key, (one.whole, *one.parts))) == 1 for one in look.examples)
        if ways == _WAYS and look.examples and alike:
            return "samples", ""
        fits = [by for by, misfit in misfits.items() if misfit is None]
        if not fits:
            by = fallback if ways == _WAYS else ways[0]
            return by, str(misfits[by])
        by_samples = {one.kind for one in weights.weightings} == {"mean"}
        if fits[:2] == ["weights", "samples"] and not by_samples and not share_of_loss:
            self._either.add(key)
            return "samples", ""
        return fits[0], ""

    def warn_of_aggregates(self) -> None:
        """Say behind the first batch of means and sums of a step's values that they are those of micro-batches."""
        for name, metric in self._metrics.items():
            if isinstance(metric, BaseAggregator) and metric.update_count != self._counts[name]:
                warn_difference(
                    f"{type(metric).__name__} {name!r} takes a value from each micro-batch under a pipeline, not one "
                    "from each batch, so its result differs unless all values are means over equally many samples: "
                    "give update() the number of samples as weight, or use self.log(..., on_epoch=True)"
                )

    def publish(self, logged: Any, *, changed_here: bool) -> None:
        """Log on this rank what :meth:`collected` gave on the last stage's.

        Args:
            logged: that.
            changed_here: this is that rank, whose metrics have the states already.
        """
        calls, states = logged
        if not changed_here:
            for name, state in states.items():
                set_metric_state(self._metrics[name], state)
        with logging_as(self._module, "training_step"):
            for call in calls:
                value = self._metrics[call.value] if isinstance(call.value, _MetricPath) else call.value
                LightningModule.log(self._module, call.name, value, **call.options, batch_size=call.size)

    def _log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        calls = getattr(self._here, "calls", None)
        if calls is None:  # not from a micro-batch's step
            LightningModule.log(self._module, name, value, *arguments, **options)
            return
        if isinstance(value, Metric):
            path = next((path for path, one in self._metrics.items() if one is value), None)
            if path is None:
                raise ValueError(
                    f"the metric logged as {name!r} is not an attribute of the module: make it one, so that the other "
                    "ranks of the pipeline find it"
                )
            value = _MetricPath(path)
        record(self._module, calls, name, value, *arguments, **options)


def _values(key: str, outputs: Sequence[Any]) -> set[float]:
    """Values that steps logged, as far as they did."""
    return {float(output[LOGGED][key].value) for output in outputs if key in output[LOGGED]}


def _counted(one: Examples) -> list[Any]:
    """Return what a step gave for the micro-batches that count: a loss over nothing shows nothing."""
    return [part for part, weight in zip(one.parts, one.weights, strict=True) if weight]


def _is_read(key: str, look: FirstLook) -> bool:
    """Return whether a number follows from values that were read; of what cannot be followed, whether it may."""
    if not look.runs:
        return not look.examples
    here = _values(key, [look.runs[0].output])
    others = [run for run in look.altered if run is not None]
    return len(others) < len(look.altered) or any(_values(key, [run.output]) != here for run in others)


def _is_share_of_loss(key: str, examples: Sequence[Examples]) -> bool:
    """Return whether a number is the loss times a constant, in all that was seen."""
    outputs = [output for one in examples for output in (one.whole, *_counted(one))]
    if not all(key in output[LOGGED] and float(loss_of(output)) for output in outputs):
        return False
    ratios = [float(output[LOGGED][key].value) / float(loss_of(output)) for output in outputs]
    return bool(ratios) and max(ratios) - min(ratios) <= _SHARE * abs(ratios[0])


def _misfit(by: By, key: str, look: FirstLook) -> str | None:
    """Text on where a number put together this way differs most from the whole batch's; None where it never does."""
    worst, message = 0.0, None
    for index, one in enumerate(look.examples):
        whole = one.whole[LOGGED].get(key)
        number = numbers_of([part[LOGGED] for part in one.parts]).get(key)
        if whole is None or number is None:
            continue
        there, here = float(whole.value), float(whole_number(by, number, one)[0])
        values = [abs(float(call.value)) for part, call in number.items() if one.weights[part] or by != "weights"]
        low = look.low_precision or torch.as_tensor(whole.value).dtype in (torch.bfloat16, torch.float16)
        near = _LOW_PRECISION if low else _NEAR
        largest = max([abs(there), *filter(math.isfinite, values)])
        off = abs(here - there) / largest if largest else 0.0 if here == there else math.inf
        if math.isfinite(there) and not off <= max(near, worst):
            worst = off if math.isfinite(off) else math.inf
            where = "where outputs of layers are others, sample by sample" if index else "in the first batch"
            message = f"{here:.4g} for {there:.4g} {where}"
    return message
