"""Whether a batch may be trained in parts: the gradient of a small batch against those of its uneven parts.

The paper takes it for granted that gradients of sub-batches add up (moDNN, section 4.2, "resulting in unchanged
accuracy"). That holds where the loss is a mean or a sum over samples, and fails for BatchNorm, contrastive losses, and
means over something else than samples, unless the parts are weighed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any

import torch
from torch import nn

from retime.foundations.arguments import AtLeast, AtMost, checked
from retime.foundations.parts import (
    Certificate,
    Count,
    Example,
    Split,
    Weighting,
    batch_statistics_layers,
    counts_of,
    fix_statistics,
    part_of,
    samples_in,
    split_batch,
    tensors_of,
)
from retime.foundations.preserve_state import Untouched, why_not_replaced
from retime.foundations.torch_private import post_accumulate_hooks, tensor_hooks
from retime.mechanisms.memory_budget.separability.dry_flow import dry_flows
from retime.mechanisms.memory_budget.separability.flow import Divisor, Flow, Operation
from retime.mechanisms.memory_budget.separability.flow_judge import FlowVerdict
from retime.mechanisms.memory_budget.separability.probe import (
    Case,
    Probe,
    Prober,
    Verdict,
    fitted_error,
    judge,
    loss_difference,
    scalar_weightings,
)

# Whether a step does the same on a whole batch as on the few samples of it that were probed, but for their number.
#
# Its operations have to be the same, and each number that it hands to them too, or grow as the number of samples does.
# A ``max(len(x), 6)`` or an ``if len(x) > 8`` is neither.

_SAME = 1e-9
_SCALES = {"mul", "div"}
_ADDITIONS = {"add"}
_SEVERAL = 3
"""So many sizes show whether something grows as they do."""


def unlike(flows: Sequence[Flow], samples: Sequence[int]) -> str:
    """What runs on batches of these sizes do in another way; empty if there is nothing.

    Args:
        flows: of runs of one step.
        samples: how many samples each has, all of them different.
    """
    towards = [flow.towards_loss() for flow in flows]
    chosen: set[int] = set()
    for operations in zip_longest(*towards):
        last = operations[-1]
        if None in operations or len({one.name for one in operations}) > 1:
            names = ", ".join(one.name if one is not None else "nothing more" for one in operations)
            return f"it runs other operations: {names}"
        if last.chosen or any(one.storage in chosen for one in last.reads):
            chosen.update(one.storage for one in last.writes)
        if reason := _difference(operations, samples, any(one.storage in chosen for one in last.reads)):
            return reason
    return ""


def _difference(runs: Sequence[Operation], samples: Sequence[int], chosen: bool) -> str:
    name = runs[0].name
    if len({_settings(one) for one in runs}) > 1:
        return f"{name} has other settings"
    for numbers in _columns([one.constants for one in runs]):
        if not _allowed(runs[0], numbers, samples, chosen):
            return f"{name} is given {', '.join(f'{number:g}' for number in numbers)}"
    if not all(math.isnan(one.divisor) for one in runs) and not _scales([one.divisor for one in runs], samples, False):
        return f"{name} is given {', '.join(f'{one.divisor:g}' for one in runs)}"
    for reads in zip(*(one.reads for one in runs), strict=False):
        for lengths in _columns([one.shape for one in reads]):
            if not _affine(lengths, samples):
                return f"{name} takes {', '.join(f'{length:g}' for length in lengths)} rows"
    return ""


def _settings(one: Operation) -> tuple[object, ...]:
    shapes = tuple(len(read.shape) for read in one.reads)
    return one.random, one.reduction, one.ignored, one.weighed, one.counting, len(one.constants), shapes


def _columns(rows: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    return list(zip(*rows, strict=True))


def _allowed(one: Operation, numbers: Sequence[float], samples: Sequence[int], chosen: bool) -> bool:
    if all(number == numbers[0] for number in numbers):
        return True
    if one.name in _SCALES:
        return _scales(numbers, samples, chosen)
    if one.name in _ADDITIONS and one.reads and not any(read.shape or read.learns for read in one.reads):
        return _scales(numbers, samples, False)  # a metric's count of its samples; dividing by it is looked at there
    return not one.pointwise and all(isinstance(number, int) for number in numbers) and _affine(numbers, samples)


def _scales(numbers: Sequence[float], samples: Sequence[int], chosen: bool) -> bool:
    """Whether a factor or a divisor is always the same, or grows or falls as the number of samples grows.

    Args:
        chosen: or as the number of rows that were chosen by values does.
    """
    if not all(map(math.isfinite, numbers)) or 0 in numbers:
        return all(number == numbers[0] for number in numbers)
    if chosen:
        return _affine(numbers, samples) or _affine([1 / number for number in numbers], samples)
    each = [number / size for number, size in zip(numbers, samples, strict=True)]
    shared = [number * size for number, size in zip(numbers, samples, strict=True)]
    return any(max(law) - min(law) <= _SAME * max(map(abs, law)) for law in (numbers, each, shared))


def _affine(numbers: Sequence[float], samples: Sequence[int]) -> bool:
    """Whether numbers are the same, or grow with the samples at the same rate."""
    if len(samples) < _SEVERAL:
        return True
    (one, two, *rest), (few, more, *larger) = numbers, samples
    rate = (two - one) / (more - few)
    return all(
        abs(number - two - rate * (size - more)) <= _SAME * max(map(abs, numbers), default=0)
        for number, size in zip(rest, larger, strict=True)
    )


# Whether a step does with as many samples as are really run what it does with the few that were probed.

_SIZES = 3
"""So many sizes show what grows with them."""


def compared(
    step: Callable[[Any], Any],
    batch: Any,
    model: nn.Module,
    found: Certificate,
    sizes: Collection[int],
    *,
    split: Split = split_batch,
    given: bool = False,
) -> Certificate:
    """The same certificate, if the step does with batches of these sizes what it does with the probed samples.

    The step is run without values, on the first samples of the batch.

    Args:
        found: one that says that the batch may be split.
        sizes: of the parts that are to run, and of the batch.
        given: the user counts what the loss is a mean over, and so answers for a step that cannot be compared.
    """
    probed = range(2, found.samples + 1)
    new = {size for size in sizes if size not in probed}
    wanted = sorted({*probed[-max(_SIZES - len(new), _SIZES - 1) :], *sizes})
    total = samples_in(batch, split)
    wanted = [size for size in wanted if size <= total]
    if len(wanted) == 1:
        return _known_sizes(found, wanted)
    batches = [batch if size == total else split(batch, size)[0] for size in wanted]
    try:
        flows = dry_flows(step, model, batches, found.reads)
    except Exception as error:  # whatever a step says to tensors without values
        text = str(error).splitlines()[0] if str(error) else "no message"
        why = f"the step does not run without values ({type(error).__name__}: {text})"
        if given:
            note = f"batches of more than {found.samples} samples were taken to do the same as that many, as {why}"
            return replace(_known_sizes(found, wanted), notes=tuple(dict.fromkeys((*found.notes, note))))
        reason = (
            f"whether the step does the same with {max(sizes)} samples as with {found.samples} is not known, as "
            f"{why}. Give loss_weight(part), which counts what the loss is a mean over, or offload only"
        )
        return Certificate(None, reason, samples=found.samples)
    if reason := unlike(flows, wanted):
        reason = (
            f"the step does something else with more samples than with fewer: with "
            f"{', '.join(map(str, wanted))} samples {reason}. Offload only"
        )
        return Certificate(None, reason, samples=found.samples)
    return _known_sizes(found, wanted)


def _known_sizes(found: Certificate, sizes: Collection[int]) -> Certificate:
    return replace(found, sizes=found.sizes | set(sizes))


_LARGEST_PROBE = 8
_ENOUGH_FOR_BATCHNORM = 3
_BATCHNORM = "BatchNorm in train mode takes its statistics over the whole batch"
_BATCHNORM_FIX = "offload only, or choose batchnorm='ghost'"
_SAME_COUNT = 1e-4
_READ = (
    "the step reads values that depend on the batch (item(), float(), bool(), tolist() or the like), and computes "
    "something else where they are others"
)
_COUNTS = (
    "each call of the step changes {}, which has a part in what it computes, and sub-batches would change it more often"
)
_RANDOM = "dropout masks and other random numbers are drawn anew for each sub-batch, so they are not the plain step's"


@checked
def certify(
    step: Callable[[Any], Any],
    batch: Any,
    model: nn.Module,
    *,
    samples: Annotated[int, AtLeast(2), AtMost(_LARGEST_PROBE)] = 5,
    split: Split = split_batch,
    loss_weight: Callable[[Any], Any] | None = None,
    ghost: bool = False,
    among: Certificate | None = None,
    read_only: bool = False,
) -> Certificate:
    """Find out whether sub-batches give the gradient of the batch, and with which weights.

    Runs the step on a few samples at once and on uneven parts of them, about 3 * ``samples`` samples forward and
    backward, twice where the batch has more samples than that: the second time on those that differ most in what can
    be counted. Where single precision cannot tell, it does so again in float64. Gradients are kept as sketches of 1024
    numbers a parameter, so the probe needs the memory of one small step and a copy of the parameters.

    It leaves no trace: see :class:`~retime.foundations.preserve_state.state.Untouched`. Dropout is off while it
    runs; other random numbers are the same for a sample whichever part it is in. Whatever a step changes outside of
    the model, such as a logger's values, its caller must keep it from changing.

    Args:
        step: computes on a batch and returns the loss: a scalar, or a mapping or object with ``loss``. It must read
            its parameters through ``model``, and not run a backward pass. Pass the bare module's step, not one that
            goes through ``DistributedDataParallel``.
        batch: a batch as it comes, on the model's device.
        samples: how many to probe with, 2 to 8.
        split: a ``split_batch`` hook, for batches that ``split_batch`` of :mod:`retime.foundations.parts`
            cannot cut.
        loss_weight: counts what the loss of a part is a mean over, where that cannot be seen from the batch.
        ghost: probe with fixed BatchNorm statistics, since each sub-batch is to have its own.
        among: a former certificate: only weightings that fitted then are considered.
        read_only: the step is known not to write into parameters, so they need not be copied.

    Raises:
        ValueError: fewer than 2 samples, a batch that cannot be split, or a step whose loss needs no gradient.
    """
    updating = [name for name, one in model.named_parameters() if post_accumulate_hooks(one)]
    if updating:
        reason = (
            f"hooks that run when a gradient has been accumulated would run for each sub-batch: {_some(updating)}; "
            "offload only, or take the hooks off"
        )
        return Certificate(None, reason)
    if fixed := why_not_replaced(model):
        return Certificate(None, f"{fixed} in a probe; offload only")
    total = samples_in(batch, split)
    if total < 2:
        raise ValueError("a batch of 1 sample has no parts to compare: probe with a batch of 2 or more")
    layers = batch_statistics_layers(model)
    known = _known(loss_weight, among)
    if layers and not ghost:
        samples = min(samples, _ENOUGH_FOR_BATCHNORM)
    examiner = _Examiner(step, batch, model, min(samples, total), total, split, layers if ghost else [], read_only)
    found = examiner.examine(None, known)
    unsure = found.weighting is None and (ghost or not layers)
    if unsure and all(p.device.type != "mps" for p in model.parameters()):
        found = examiner.examine_precisely(known) or found
    if found.separable:
        return compared(step, batch, model, found, {total}, split=split, given=loss_weight is not None)
    if layers and not ghost:
        reason = f"{_BATCHNORM}: {_some(layers)}; {_BATCHNORM_FIX}"
        return replace(found, reason=reason, layers=tuple(layers))
    return found


def _known(loss_weight: Callable[[Any], Any] | None, among: Certificate | None) -> list[Weighting] | None:
    """The weightings to choose from, where they are not open."""
    if loss_weight is not None:
        return [Weighting("count", loss_weight)]
    if among is not None and among.weighting is not None:
        return [among.weighting, *among.alternatives]
    return None


class _Examiner:
    def __init__(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        model: nn.Module,
        samples: int,
        total: int,
        split: Split,
        ghosts: Sequence[str],
        read_only: bool,
    ) -> None:
        self._read_only = read_only
        self._step, self._batch, self._model = step, batch, model
        self._samples, self._total, self._split, self._ghosts = samples, total, split, ghosts

    def examine_precisely(self, known: list[Weighting] | None) -> Certificate | None:
        """In float64; None where the step does not run in it."""
        try:
            return self.examine(torch.float64, known)
        except Exception:  # whatever a step says to tensors of another type
            return None

    def examine(self, dtype: torch.dtype | None, known: list[Weighting] | None) -> Certificate:
        fix = partial(fix_statistics, self._model, self._ghosts)
        with Untouched(self._model, dtype, fix, read_only=self._read_only, step=self._step) as scratch:
            prober = Prober(self._step, scratch, dtype, self._split)
            first = prober.probe(self._first(), range(self._samples))
            probes, broken = first.probes, first.failure
            flow, part = (FlowVerdict(), None) if broken else probes[0].flow()
            counts = self._counts(prober, flow.divisors)
            candidates = _possible(known, flow.divisors) or [
                Weighting("mean"),
                *_counting(flow.divisors),
                *([] if flow.divisors else [Weighting("sum")]),
            ]
            if not broken and (second := self._second(known or counts)) is not None:
                more = prober.probe(second, range(self._samples, 2 * self._samples))
                probes, broken = [*probes, *more.probes], more.failure
            if flow.read and not broken and not flow.reason:
                names = range(self._samples)
                if prober.depends_on_reads(self._first(), names, probes[0].full, flow.read):
                    flow = replace(flow, reason=_READ, weights=False)
            if broken:
                return Certificate(None, broken, samples=self._samples)
            concluded = _concluded(probes, candidates, prober.epsilon, self._samples, known is not None)
            concluded = _in_view_of(flow, concluded, self._first(), part)
            if concluded.separable:
                counters = prober.depends_on_counters(self._first(), range(self._samples), probes[0].full)
                if counters:
                    reason = f"{_COUNTS.format(counters)}. Offload only"
                    concluded = Certificate(None, reason, samples=self._samples)
            if concluded.separable and prober.zeros:
                concluded = self._with_all_terms(prober, concluded)
            if concluded.weighting is not None and set(probes[0].full.scalars.values()) != {probes[0].full.loss}:
                unlike = prober.unlike(self._first(), range(self._samples))
                if unlike is not None and _is_comparable(unlike, probes[0], concluded):
                    concluded = _with_outputs(concluded, concluded.weighting, [*probes, unlike])
        notes = [_RANDOM] if prober.random or any(_drops(module) for module in self._model.modules()) else []
        hooked = [name for name, parameter in self._model.named_parameters() if tensor_hooks(parameter)]
        if hooked:
            notes.append(f"gradient hooks run once for each sub-batch: {_some(hooked)}")
        if not concluded.separable:
            return concluded
        sizes = {size for probe in probes for case in probe.cases for size in (sum(case.samples), *case.samples)}
        reads = tuple(one if isinstance(one, bool | int | float) else None for one in prober.reads or ())
        return replace(concluded, notes=tuple(notes), sizes=frozenset(sizes), reads=reads)

    def _with_all_terms(self, prober: Prober, found: Certificate) -> Certificate:
        """The same, if its weights hold too where terms that count for nothing yet count."""
        lifted = prober.lifted(self._first(), range(self._samples))
        if lifted.failure:
            return Certificate(None, lifted.failure, samples=self._samples)
        fitting = [one for one in (found.weighting, *found.alternatives) if one is not None]
        again = _concluded(lifted.probes, fitting, prober.epsilon, self._samples, True)
        if again.weighting is None:
            reason = f"the loss has a term that is multiplied by 0 now, and where it is not, {again.reason}"
            return replace(again, reason=reason)
        others = tuple(one for one in again.alternatives if one in found.alternatives)
        return replace(found, weighting=again.weighting, alternatives=others)

    def _first(self) -> Any:
        if self._total == self._samples:
            return self._batch
        return self._split(self._batch, self._samples)[0]

    def _counts(self, prober: Prober, divisors: Set[Divisor]) -> list[Weighting]:
        ignored = {(place, "!=", float(by.ignored)) for by in divisors for place in by.places if by.ignored is not None}
        return [Weighting("count", count) for count in counts_of(self._batch, prober.compared | ignored)]

    def _second(self, candidates: Sequence[Weighting]) -> Any | None:
        """Samples that differ most in what can be counted; another part of the batch where samples cannot be chosen."""
        if self._total <= self._samples:
            return None
        if self._split is not split_batch:
            parts = [part for part in self._split(self._batch, self._samples)[1:] if self._size(part) == self._samples]
            return parts[-1] if parts else None
        few: dict[int, None] = {}
        many: dict[int, None] = {}
        for candidate in candidates:
            if isinstance(candidate.count, Count) and candidate.count.place in tensors_of(self._batch):
                counted = candidate.count.per_sample(self._batch)
                if len(counted) == self._total and counted.min() < counted.max():
                    few.setdefault(int(counted.argmin()))
                    many.setdefault(int(counted.argmax()))
        if not few:
            return None
        chosen = [*few, *many][: self._samples]
        rest = [index for index in reversed(range(self._total)) if index not in chosen]
        # last comes one that counts little, which is a part by itself
        indices = [*rest[: self._samples - len(chosen)], *reversed(chosen)]
        return part_of(self._batch, torch.tensor(indices), self._total)

    def _size(self, part: Any) -> int:
        return samples_in(part, self._split)


def _possible(known: Sequence[Weighting] | None, divisors: Set[Divisor]) -> list[Weighting]:
    """Return the weightings that are possible for a loss that is a mean over what is counted in the batch."""
    return [one for one in known or () if not isinstance(one.count, Count) or any(_is(one, by) for by in divisors)]


def _counting(divisors: Set[Divisor]) -> list[Weighting]:
    counts = {by.count for by in divisors if by.count is not None and not by.some}
    return [Weighting("count", count) for count in sorted(counts, key=str)]


def _is(weighting: Weighting, divisor: Divisor) -> bool:
    return weighting.count is not None and not divisor.some and weighting.count == divisor.count


def _explains(weighting: Weighting, divisor: Divisor, whole: Any, part: Any) -> bool:
    """Whether the loss is divided by what is counted so."""
    if divisor.some:  # a mean over samples, as long as nothing there is left out
        return weighting.kind == "mean"
    if not _is(weighting, divisor) or weighting.count is None:
        return False
    if divisor.ignored is not None:
        return True
    counted = float(weighting.count(part)), float(weighting.count(whole))
    return not counted[0] or abs(counted[0] / counted[1] - divisor.ratio) <= _SAME_COUNT


def _in_view_of(flow: FlowVerdict, found: Certificate, whole: Any, part: Any) -> Certificate:
    """The probe's certificate, unless other values than those that were probed may need other weights."""
    weighting = found.weighting
    given = weighting is not None and weighting.count is not None and not isinstance(weighting.count, Count)
    if weighting is None:
        return found
    if flow.reason and not (given and flow.weights):
        fix = "Give loss_weight(part), which counts it, or offload only" if flow.weights else "Offload only"
        reason = f"{flow.reason}: other batches may need other weights than the {found.samples} samples probed. {fix}"
        return replace(found, weighting=None, reason=reason, alternatives=(), outputs={}, unclear=())
    fitting = [weighting, *found.alternatives]
    for divisor in flow.divisors:
        if not given and not any(_explains(one, divisor, whole, part) for one in fitting):
            reason = (
                f"the loss is divided by, or a mean over, something that follows from {_some(sorted(divisor.places))} "
                "and cannot be counted there. Give loss_weight(part), which counts it, or offload only"
            )
            return replace(found, weighting=None, reason=reason, alternatives=(), outputs={}, unclear=())
    if flow.means and not given and all(one.kind != "mean" for one in fitting):
        reason = "the loss adds a mean over samples to a mean over something else. Offload only"
        return replace(found, weighting=None, reason=reason, alternatives=(), outputs={}, unclear=())
    complete = tuple(divisor.count for divisor in flow.divisors if divisor.some and divisor.count is not None)
    return replace(found, constants=any(divisor.ignored is None for divisor in flow.divisors), complete=complete)


def _concluded(
    probes: list[Probe], candidates: Sequence[Weighting], epsilon: float, samples: int, known: bool
) -> Certificate:
    verdicts = [(weighting, judge(weighting, probes, epsilon)) for weighting in candidates]
    fitting = [(weighting, verdict) for weighting, verdict in verdicts if verdict.fits]
    best = min((verdict for _, verdict in verdicts), key=lambda verdict: verdict.error)
    changed = sorted({name for probe in probes for name in probe.changed_differently(best.tolerance)})
    if changed:
        layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in changed))
        reason = (
            f"each forward pass changes {_some(changed)}, so sub-batches would change it several times; offload only"
        )
        return Certificate(None, reason, layers, best.error, best.tolerance, samples)
    if fitting:
        weighting, verdict = fitting[0]
        others = tuple(other for other, _ in fitting[1:] if other.kind != "sum")
        found = Certificate(weighting, "", (), verdict.error, verdict.tolerance, samples, others)
        return _with_outputs(found, weighting, probes)
    return Certificate(None, _why_not(probes, best, known, samples), best.layers, best.error, best.tolerance, samples)


def _with_outputs(found: Certificate, weighting: Weighting, probes: Sequence[Probe]) -> Certificate:
    """The same, with what the probes tell of the scalars that the step returns."""
    outputs = scalar_weightings(probes, [weighting, Weighting("mean"), Weighting("sum")], found.tolerance)
    unclear = tuple(place for place in probes[0].full.scalars if place not in outputs)
    examples = tuple(_example(probe, case, weighting) for probe in probes for case in probe.cases)
    return replace(found, outputs=outputs, unclear=unclear, examples=examples)


def _is_comparable(unlike: Probe, plain: Probe, found: Certificate) -> bool:
    """Whether each sample had the same noise in all runs, and all scalars still have a value."""
    runs = [unlike.full, *(run for case in unlike.cases for run in case.runs)]
    finite = {place for place, value in plain.full.scalars.items() if math.isfinite(value)}
    assert found.weighting is not None
    return all(
        finite <= {place for place, value in run.scalars.items() if math.isfinite(value)} for run in runs
    ) and all(
        loss_difference(unlike.full, case, found.weighting.of(case.parts, case.samples)) <= found.tolerance
        for case in unlike.cases
    )


def _example(probe: Probe, case: Case, weighting: Weighting) -> Example:
    weights = weighting.of(case.parts, case.samples)
    return Example(probe.full.scalars, tuple(run.scalars for run in case.runs), tuple(case.samples), tuple(weights))


def _why_not(probes: list[Probe], best: Verdict, known: bool, samples: int) -> str:
    if not probes[0].full.gradients:
        return "the loss reaches no parameter of the model, so there is nothing to compare"
    text = f"the gradient of {samples} samples differs by {best.error:.1e} from the best sum over its parts"
    if fitted_error(probes) <= best.tolerance:
        return (
            f"{text}, though some weights would fit: the loss is a mean over something that cannot be counted in the "
            "batch. Give loss_weight(part), which counts it, or offload only"
        )
    if known:
        text += ", weighed as was given"
    return (
        f"{text}, most in {_some(best.layers)}: samples influence one another, as in contrastive losses, or the step "
        "keeps a state between calls. Offload only"
    )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.training and module.dropout > 0


def _some(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(name or "the model itself" for name in names[:shown]) + more
