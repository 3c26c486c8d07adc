"""A pipeline's ranks beside one device: what `training_step` notes, and what each rank has of the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from contract.record import Record
from retime.foundations.parts import balanced_parts, samples_in
from retime.mechanisms.pipeline.checks import all_gather_object
from retime.strategies import OOOPipelineStrategy

IN_PARTS = frozenset({"optimizers", "trace"})
"""What of a fit each rank has for its own layers only."""
WHOLE = frozenset({"weights", "schedulers", "global_step", "epoch", "logged", "metrics"})
"""What of a fit each rank has to have by itself."""


class InStages(OOOPipelineStrategy):
    """Puts together what `training_step` noted, once a micro-batch and on the ranks that came to it, as for a batch."""

    @contextmanager
    def _tried_out(self, trainer: Trainer) -> Iterator[None]:
        trace = self._trace()
        before = len(trace)
        with super()._tried_out(trainer):
            yield
        del trace[before:]

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._step is None or self._now is None:
            return super().backward(*args, **kwargs)
        trace, batch = self._trace(), self._now[0][0]
        before, samples = len(trace), samples_in(batch)
        loss = super().backward(*args, **kwargs)
        parts = balanced_parts(batch, -(-samples // self._step.microbatches))
        noted = together(trace[before:], [samples_in(part) / samples for part in parts])
        everyone = all_gather_object(noted, self._step._place.group)
        trace[before:] = of_all_ranks(everyone)
        return loss

    def activity(self) -> Any:
        """As a `report()` in the table: steps of several micro-batches."""
        report = self.report()
        return SimpleNamespace(fused_updates=report.steps if report.micro_batches > 1 else 0, plain_steps={})

    def _trace(self) -> list[Any]:
        trace = getattr(self.lightning_module, "trace", None)
        return trace if trace is not None else []


class OneRankIsWrong(InStages):
    """Trains the layers of the last rank with gradients that are a ten-thousandth too large."""

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        for parameter in self.lightning_module.parameters():
            if self.global_rank and parameter.grad is not None:
                parameter.grad.mul_(1.0001)
        return loss


def together(entries: Sequence[dict[str, Any]], weights: Sequence[float]) -> list[dict[str, Any]]:
    """What micro-batches noted, as for the batch: what is the same in all of them, or the mean by samples.

    Args:
        entries: of all micro-batches, in their order.
        weights: of the micro-batches.
    """
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        alike.setdefault(tuple(entry), []).append(entry)
    together: list[dict[str, Any]] = []
    for names, noted in alike.items():
        each, rest = divmod(len(noted), len(weights))
        assert not rest, f"{len(noted)} notes of {names} in {len(weights)} micro-batches"
        together += [
            {name: _mean([one[name] for one in noted[first::each]], weights) for name in names} for first in range(each)
        ]
    return together


def _mean(values: list[Any], weights: Sequence[float]) -> Any:
    if all(_same(values[0], value) for value in values):
        return values[0]
    if isinstance(values[0], Tensor):
        assert values[0].dim() == 0, "notes of micro-batches that are no numbers cannot be put together"
        return sum(weight * value.double() for weight, value in zip(weights, values, strict=True)).to(values[0])
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other)


def of_all_ranks(everyone: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The notes of the rank that made most, with what others have in the place of its NaN."""
    most = max(everyone, key=len)
    completest = []
    for entry in most:
        for notes in everyone:
            entry = next((completed(entry, other) for other in notes if other.keys() == entry.keys()), entry)
        completest.append(entry)
    return completest


def completed(mine: Any, other: Any) -> Any:
    """A value of one rank, with another's where it has NaN or nothing."""
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        same = mine.shape == other.shape and mine.is_floating_point()
        return torch.where(mine.isnan(), other.to(mine.dtype), mine) if same else mine
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*mine, *other])
        return {key: completed(mine.get(key), other.get(key)) for key in keys}
    if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        return [completed(one, two) for one, two in zip(mine, other, strict=True)]
    return other if mine is None or (isinstance(mine, float) and mine != mine) else mine


def all_completed(records: Sequence[Record], scenario: str) -> list[Record]:
    """Each rank's record, with the others' values where a rank has only those of its layers."""
    whole = WHOLE - {"weights"} if "exception" in scenario else WHOLE  # then each rank is left with its own layers
    return [_completed(record, [one for one in records if one is not record], whole) for record in records]


def _completed(record: Record, others: Sequence[Record], whole: frozenset[str]) -> Record:
    entries = dict(record.entries)
    for name, entry in record.entries.items():
        for other in others:
            entries[name] = completed(entries[name], other.entries.get(name))
        if name.startswith("fit "):
            entries[name] |= {part: entry[part] for part in whole}
    return Record(entries, record.fused_updates, record.reasons, record.own_warnings)
