"""What a training step logs in a pipeline: for each micro-batch where the last stage is, and then on all ranks."""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from retime.foundations.messages import warn_difference
from retime.foundations.parts import NotUnderstoodError, loss_of
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.pipeline import Examples, FirstLook, LossWeights
from retime.strategies.support.lightning_private import logging_as, metric_state, set_metric_state

# What a training step leaves on its module, where it runs once a micro-batch and not on all ranks.

_LIGHTNINGS = set(vars(LightningModule()))


class KeptAttributes:
    """Notices which attributes of a module a step writes, and which of its lists, sets and dictionaries grow.

    Args:
        module: whose step it is. Its submodules and Lightning's own attributes do not count.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._names: dict[str, None] = {}
        self._logs = False

    def note_logger(self) -> None:
        """The step asks one of the Trainer's loggers to write."""
        self._logs = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around one call of the step."""
        before = self._found()
        yield
        after = self._found()
        self._names |= dict.fromkeys(name for name, state in after.items() if before.get(name) != state)

    def warn(self) -> None:
        """Say what was noticed, if anything was."""
        if self._names:
            warn_difference(
                f"training_step keeps {', '.join(map(repr, self._names))} on the module: under a pipeline it runs once "
                "a micro-batch, and comes past its layers only on the rank of the last stage, so hooks find other "
                "values there, and old ones on other ranks. Return them in training_step's dictionary, which "
                "on_train_batch_end gets for the whole batch on all ranks, or use self.log()"
            )

        if self._logs:
            warn_difference(
                "training_step writes to self.logger: under a pipeline it runs once a micro-batch, and comes past its "
                "layers only on the rank of the last stage, while loggers write on the first. Use self.log(), or write "
                "in on_train_batch_end"
            )

    def _found(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(value), len(value) if isinstance(value, list | dict | set | deque) else 0)
            for name, value in vars(self._module).items()
            if name not in _LIGHTNINGS and not isinstance(value, nn.Module)
        }


_LOG = inspect.signature(LightningModule.log)
_METRIC = "metric"
_NEAR, _LOW_PRECISION = 1e-5, 3e-2
"""Relative to the largest of the numbers, as layers compute in 32 bits or in 16."""
_SHARE = 1e-5
_REDUCED = ("sum", "max", "amax", "min", "amin")
"""Ways to reduce that micro-batches are reduced by as well."""
_RULES = ("loss", "samples", "sum")
"""How else numbers are put together: weighed as losses, by samples, or not at all."""
_EITHER = "either"
"""By samples, as long as losses are weighed by samples too."""
_SAME = 1e-9
_Key = tuple[str, int]


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
        self._rules: dict[_Key, str] = {}
        self._fallback = "loss"

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

    def collected(
        self, calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float], samples: Sequence[int]
    ) -> Any:
        """What other ranks are to be told: calls put together, and metrics that have changed.

        Args:
            calls: of each micro-batch.
            weights: of their losses.
            samples: in them.
        """
        states = {
            name: metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._counts[name]
        }
        numbers = _numbers(calls, weights, samples)
        unlike = any(abs(weight - size / sum(samples)) > _SAME for weight, size in zip(weights, samples, strict=True))
        for key in [key for key, rule in self._rules.items() if rule == _EITHER and unlike]:
            self._rules[key] = "samples"
            warn_difference(
                f"the logged value {key[0]!r} is a mean over samples or over what the loss is a mean over, which were "
                "the same in the first batch and are not in this one: under a pipeline it is taken for a mean over "
                "samples from now on. Log the tensor in place of a number of Python's, which does not tell",
                every_rank=True,  # only the last stage's knows
            )
        for key, found in numbers.items():
            if key not in self._rules and not _is_clear(found):
                self._rules[key] = self._fallback
                warn_difference(
                    f"the logged value {key[0]!r} was not logged in the first batch, which shows how a pipeline has to "
                    "put such values together from micro-batches: it is taken for a mean over what the loss is a mean "
                    "over, or over samples where that is a sum. Log it in each batch, or a torchmetrics object, which "
                    "sees all samples",
                    every_rank=True,  # only the last stage's knows
                )
        return [_combined(found, self._rules.get(key, "")) for key, found in numbers.items()], states

    def look(self, look: FirstLook, weights: LossWeights, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> None:
        """See how each number of the first batch is to be put together, and say of which there is no way to.

        Args:
            look: at the first batch.
            weights: of micro-batches' losses.
            calls: what was logged, in what a step returned.
        """
        if {one.kind for one in weights.weightings} == {"sum"}:
            self._fallback = "samples"
        outputs = [*(one.whole for one in look.examples), *(run.output for run in look.runs)]
        for key, call in _numbered(calls(outputs[0]) if outputs else ()):
            if _METRIC in call:
                if call.get("on_step") is not False:
                    warn_difference(
                        f"the metric {call['name']!r} is logged in each step: what is shown there is its last "
                        "micro-batch's under a pipeline, and the epoch's value is that of all samples: log it with "
                        "on_step=False, on_epoch=True"
                    )
                continue
            rule, why = self._rule(look, weights, key, call, calls)
            self._rules[key] = rule
            if why:
                warn_difference(
                    f"the logged value {call['name']!r} is put together from micro-batches under a pipeline, and is "
                    f"not the whole batch's: {why}. Log the means or sums over samples that it is computed from, or a "
                    "torchmetrics object, which sees all samples"
                )

    def _rule(
        self,
        look: FirstLook,
        weights: LossWeights,
        key: _Key,
        call: dict[str, Any],
        calls: Callable[[Any], Sequence[dict[str, Any]]],
    ) -> tuple[str, str]:
        """How a number is put together, and why that is not the whole batch's."""
        rules: tuple[str, ...] = ("reduced",) if _reduction(call) in _REDUCED else _RULES
        try:
            head = look.head_of(lambda output: dict(_numbered(calls(output))).get(key, {}).get("value"))
        except NotUnderstoodError as error:
            if rules == _RULES or _reduction(call) == "sum":
                return self._fallback, f"it is no mean or sum over samples ({error})"
            head = None
        if head is not None and rules == _RULES:
            kinds = {one.kind for one in head.weightings}
            if head.like_loss or (kinds and set(head.weightings) <= set(weights.weightings)):
                rules = ("loss",)
            elif kinds in ({"mean"}, {"sum"}):
                rules = ("samples",) if kinds == {"mean"} else ("sum",)
            elif kinds:
                return "loss", f"it is a {head.weightings[0]}, and the loss is not"
        found = {rule: _misfits(rule, key, look, calls) for rule in rules}
        if rules == _RULES and head is None:
            unlike = len(look.examples) > 1 and any(
                len(_values(key, _counted(one), calls)) > 1 for one in look.examples
            )
            if not unlike and _is_read(key, look, calls) and not _is_share_of_loss(key, look.examples, calls):
                return (
                    self._fallback,
                    "it is no tensor, and the first batch does not show of unlike micro-batches what it is",
                )
        if rules == _RULES and look.examples and all(_is_constant(key, one, calls) for one in look.examples):
            return "samples", ""
        fitting = [rule for rule, misfits in found.items() if misfits is None]
        if not fitting:
            rule = self._fallback if rules == _RULES else rules[0]
            return rule, str(found[rule])
        by_samples = {one.kind for one in weights.weightings} == {"mean"}
        if fitting[:2] == ["loss", "samples"] and not by_samples and not _is_share_of_loss(key, look.examples, calls):
            return _EITHER, ""
        return fitting[0], ""

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


_Found = list[tuple[dict[str, Any], float, int]]


def _numbered(calls: Sequence[dict[str, Any]]) -> Iterator[tuple[_Key, dict[str, Any]]]:
    """The n-th call with a name is another number than the first."""
    counted: Counter[str] = Counter()
    for call in calls:
        yield (call["name"], counted[call["name"]]), call
        counted[call["name"]] += 1


def _numbers(
    calls: Sequence[Sequence[dict[str, Any]]], weights: Sequence[float], samples: Sequence[int]
) -> dict[_Key, _Found]:
    numbers: dict[_Key, _Found] = {}
    for micro_batch, weight, size in zip(calls, weights, samples, strict=True):
        for key, call in _numbered(micro_batch):
            numbers.setdefault(key, []).append((call, weight, size))
    return numbers


def _reduction(call: dict[str, Any]) -> str:
    reduce = call.get("reduce_fx", "mean")
    return reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")


def _is_clear(found: _Found) -> bool:
    """Whether there is one way to put numbers together, or all are the same."""
    call = found[0][0]
    if _METRIC in call or len(found) == 1 or _reduction(call) in _REDUCED:
        return True
    return len({float(one["value"]) for one, _, _ in found}) == 1


def _values(key: _Key, outputs: Sequence[Any], calls: Callable[[Any], Sequence[dict[str, Any]]]) -> set[float]:
    """What steps logged, as far as they did."""
    logged = [dict(_numbered(calls(output))).get(key) for output in outputs]
    return {float(call["value"]) for call in logged if call is not None}


def _counted(one: Examples) -> list[Any]:
    """Return what a step gave for the micro-batches that count: a loss over nothing shows nothing."""
    return [part for part, weight in zip(one.parts, one.weights, strict=True) if weight]


def _is_constant(key: _Key, one: Examples, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> bool:
    """Whether a number is the same for a batch and each of its parts."""
    return len(_values(key, (one.whole, *one.parts), calls)) == 1


def _is_read(key: _Key, look: FirstLook, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> bool:
    """Whether a number follows from values that were read; of what cannot be followed, whether it may."""
    if not look.runs:
        return not look.examples
    here = _values(key, [look.runs[0].output], calls)
    others = [run for run in look.altered if run is not None]
    return len(others) < len(look.altered) or any(_values(key, [run.output], calls) != here for run in others)


def _is_share_of_loss(
    key: _Key, examples: Sequence[Examples], calls: Callable[[Any], Sequence[dict[str, Any]]]
) -> bool:
    """Whether a number is the loss times a constant, in all that was seen."""
    outputs = [output for one in examples for output in (one.whole, *_counted(one))]
    if not all(float(loss_of(output)) for output in outputs):
        return False
    shares = [float(dict(_numbered(calls(output)))[key]["value"]) / float(loss_of(output)) for output in outputs]
    return bool(shares) and max(shares) - min(shares) <= _SHARE * abs(shares[0])


def _misfits(rule: str, key: _Key, look: FirstLook, calls: Callable[[Any], Sequence[dict[str, Any]]]) -> str | None:
    """Where a number that is put together by a rule differs most from the whole batch's; None where it never does."""
    worst, said = 0.0, None
    for number, one in enumerate(look.examples):
        whole = dict(_numbered(calls(one.whole))).get(key)
        found = _numbers([calls(part) for part in one.parts], one.weights, one.samples).get(key)
        if whole is None or found is None:
            continue
        there, here = float(whole["value"]), float(_combined(found, rule)["value"])
        values = [abs(float(call["value"])) for call, weight, _ in found if weight or rule != "loss"]
        low = look.low_precision or torch.as_tensor(whole["value"]).dtype in (torch.bfloat16, torch.float16)
        near = _LOW_PRECISION if low else _NEAR
        largest = max([abs(there), *filter(math.isfinite, values)])
        off = abs(here - there) / largest if largest else 0.0 if here == there else math.inf
        if math.isfinite(there) and not off <= max(near, worst):
            worst = off if math.isfinite(off) else math.inf
            where = "where outputs of layers are others, sample by sample" if number else "in the first batch"
            said = f"{here:.4g} for {there:.4g} {where}"
    return said


def _combined(found: _Found, rule: str = "") -> dict[str, Any]:
    """One call for those of the same name in all micro-batches."""
    call = dict(found[0][0])
    sizes = [one.get("batch_size") for one, _, _ in found]
    if all(size is not None for size in sizes):
        call["batch_size"] = sum(sizes)
    if _METRIC in call or len(found) == 1:
        return call
    given = [torch.as_tensor(one["value"]).cpu().squeeze() for one, _, _ in found]
    values = torch.stack([value.double() for value in given])
    name = _reduction(call)
    weights = torch.tensor([weight for _, weight, _ in found], dtype=torch.float64)
    samples = torch.tensor([size for _, _, size in found], dtype=torch.float64)
    counts = weights != 0  # a loss over nothing has no value
    if name == "sum" or (rule == "sum" and name not in _REDUCED):
        call["value"] = values.sum()
    elif name in ("max", "amax"):
        call["value"] = values.max()
    elif name in ("min", "amin"):
        call["value"] = values.min()
    elif rule == "loss":
        call["value"] = (values * weights)[counts].sum()
    elif rule in ("samples", _EITHER):
        call["value"] = (values * samples).sum() / samples.sum()
    else:
        call["value"] = (values * weights)[counts].sum() / weights.sum()
    kind = given[0].dtype if given[0].is_floating_point() else torch.get_default_dtype()
    call["value"] = call["value"].to(kind)
    return call
