"""Whether a batch may be trained in parts: the gradient of a small batch against those of its uneven parts.

The paper takes it for granted that gradients of sub-batches add up (moDNN, section 4.2, "resulting in unchanged
accuracy"). That holds where the loss is a mean or a sum over samples, and fails for BatchNorm, contrastive losses, and
means over something else than samples, unless the parts are weighed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from retime.foundations.arguments import AtLeast, AtMost, checked
from retime.foundations.parts import (
    READS,
    Certificate,
    Example,
    Head,
    NotUnderstoodError,
    RecordedRun,
    Recorder,
    Split,
    Weighting,
    batch_statistics_layers,
    fix_statistics,
    head_of,
    head_of_loss,
    loss_of,
    record,
    record_altered,
    samples_in,
    split_batch,
    tensors_of,
)
from retime.foundations.preserve_state import (
    DryMode,
    ExternalTensors,
    ScratchModel,
    fake,
    preserve_state,
    stand_ins,
    why_not_replaced,
)
from retime.foundations.torch_private.engine import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    schema_of,
    without_dispatch_modes,
)
from retime.foundations.torch_private.tensors import post_accumulate_hooks, tensor_hooks
from retime.mechanisms.memory_budget.separability.probe import (
    Case,
    Probe,
    Prober,
    Verdict,
    first_line,
    fitted_error,
    is_out_of_memory,
    judge,
    loss_difference,
    scalar_weightings,
)

# Whether a step does with as many samples as are really run what it does with the few that were probed.


class _WithoutValues(Recorder):  # type: ignore[no-untyped-call]
    """Notes operations on fake tensors, and makes up what follows from values.

    How many rows an operation gives that chooses them by their values is made up: one more than there are values.

    Args:
        reads: the values that the step has read when it was really run.
    """

    def __init__(self, reads: Sequence[Any], *args: Any) -> None:
        super().__init__(*args)
        self._left = list(reads)

    def read(self, value: Any, tensor: Tensor | None) -> Any:
        del self._left[:1]
        return super().read(value, tensor)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else None
        if not hasattr(func, "tags") and isinstance(given, FakeTensor):  # tolist() and its like
            if not given.dim():
                return self._instead_of(given)
            with without_dispatch_modes():
                return func(torch.zeros(given.shape, dtype=given.dtype), *args[1:], **kwargs)
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._made_up(func, args, kwargs)

    def _made_up(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, given = schema_of(func).name.removeprefix("aten::"), args[0]
        if name in READS:
            return self._instead_of(given)
        more, whole = given.numel() + 1, {"dtype": torch.int64, "device": given.device}
        if name == "index":
            return func(given, [at for one in args[1] for at in _places(one)])
        if name == "nonzero":
            return torch.zeros(more, given.dim(), **whole)
        if name == "masked_select":
            return given.new_zeros(more)
        if name == "bincount":
            return torch.zeros(kwargs.get("minlength", args[2] if len(args) > 2 else 0) or more, **whole)
        if name == "repeat_interleave":
            return torch.zeros(more, **whole)
        if name in ("_unique2", "unique_consecutive", "_unique"):
            outputs = given.new_zeros(more), torch.zeros(given.shape, **whole), torch.zeros(more, **whole)
            return outputs[: len(schema_of(func).returns)]
        return func(*args, **kwargs)

    def _instead_of(self, tensor: Tensor) -> Any:
        """Value that the step read there when it really ran, or any other value of that kind."""
        value = self._left[0] if self._left else None
        if isinstance(value, bool | int | float):
            return value
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


_WEIGHT = 0.7310585786300049
"""No number that a step would use."""
_MOST = 256
"""Weights of terms are few; a table of more entries is something else."""
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
_SCALED = {"add": "alpha", "sub": "alpha", "rsub": "alpha", "addmm": "alpha", "addmv": "alpha", "baddbmm": "alpha"}


class _ZeroWeights(Recorder):  # type: ignore[no-untyped-call]
    """Finds numbers 0 that what follows from samples or parameters is multiplied by.

    A term that is multiplied by 0 in the first batch (a warm-up, a weight of a schedule) has no gradient there,
    whatever it does to its samples.

    Args:
        zeros: gets an entry for each that is found.
        perturbed: another number takes their place.
    """

    def __init__(self, zeros: list[str], perturbed: bool, *args: Any) -> None:
        super().__init__(*args)
        self._zeros, self._perturbed = zeros, perturbed

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = schema_of(func).name.removeprefix("aten::").removesuffix("_") if hasattr(func, "tags") else ""
        if name in _PRODUCTS:
            args = (self._weight(args[0], args[1]), self._weight(args[1], args[0]), *args[2:])
        elif name == "lerp":
            args = (*args[:2], self._weight(args[2], args[0]), *args[3:])
        elif name in _SCALED and kwargs.get(_SCALED[name], 1) == 0:
            kwargs = {**kwargs, _SCALED[name]: self._weight(0, next(filter(self._follows, args), None))}
        return super().run(func, args, kwargs)

    def _weight(self, value: Any, other: Any) -> Any:
        if not self._follows(other) or not self._is_zero(value):
            return value
        self._zeros.append("0")
        if not self._perturbed or not isinstance(value, Tensor):
            return _WEIGHT if self._perturbed else value
        kept = value if value.is_floating_point() else value.to(other.dtype)
        return torch.where(kept == 0, torch.full_like(kept, _WEIGHT), kept)

    def _is_zero(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, int | float) and value == 0
        trained = value.requires_grad and not (value.is_leaf and value.numel() == 1)
        if trained or value.numel() > _MOST or value.is_complex() or self.operation_of(value).varies:
            return False
        return bool((value == 0).any())

    def _follows(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        return value.requires_grad or self.operation_of(value).varies


def _places(chosen: Tensor | None) -> list[Tensor | None]:
    """Rows by their numbers instead of by truth values."""
    if chosen is None or chosen.dtype not in (torch.bool, torch.uint8):
        return [chosen]
    return [torch.zeros(chosen.numel() + 1, dtype=torch.int64, device=chosen.device)] * chosen.dim()


def check_sizes(
    step: Callable[[Any], Any],
    batch: Any,
    model: nn.Module,
    certificate: Certificate,
    sizes: Collection[int],
    *,
    split: Split = split_batch,
    given: bool = False,
    ghost: bool = False,
) -> Certificate:
    """The same certificate, if the loss of batches of these sizes is of its samples what it is of the probed ones.

    The step is run without values, on the first samples of the batch.

    Args:
        certificate: one that says that the batch may be split.
        sizes: of the parts that are to run, and of the batch.
        given: the user counts what the loss is a mean over, and so answers for all sizes.
        ghost: as in :func:`certify`.
    """
    total = samples_in(batch, split)
    wanted = [size for size in sorted(sizes) if certificate.samples < size <= total]
    if given or not wanted:
        return _known_sizes(certificate, sizes)
    batches = [batch if size == total else split(batch, size)[0] for size in (certificate.samples, *wanted)]
    counts = [None if split is split_batch else size for size in (certificate.samples, *wanted)]
    ghosts = batch_statistics_layers(model) if ghost else []
    kind, runs = partial(_WithoutValues, certificate.reads), list[RecordedRun]()
    try:
        mode = DryMode()
        replacement = fake(mode)
        parts = [replacement.batch(one) for one in batches]
        with mode.open(), stand_ins(model, replacement), torch.random.fork_rng(devices=[]):
            outside, saved = ExternalTensors(replacement.stand_ins), preserve_state(model, step)
            for part, count in zip(parts, counts, strict=True):
                with saved, mode, outside.put_back_after():
                    fix_statistics(model, ghosts)
                    runs.append(record(lambda one: loss_of(step(one)).detach(), part, kind=kind, samples=count))
    except Exception as error:  # whatever a step says to tensors without values
        reason = (
            f"whether the step does the same with {max(sizes)} samples as with {certificate.samples} is not known, as "
            f"the step does not run without values ({first_line(error)}); {_WHAT_TO_DO}"
        )
        return Certificate(None, reason, samples=certificate.samples)
    few, *larger = runs
    for size, run in zip(wanted, larger, strict=True):
        try:
            weightings = head_of((run, run.output), (few, few.output), values=False).weightings or (Weighting("mean"),)
            together = " and a ".join(map(str, weightings))
            reason = "" if set(weightings) == _weightings(certificate) else f"its loss is a {together}"
        except NotUnderstoodError as error:
            reason = str(error)
        if reason:
            reason = (
                f"the step does something else with more samples than with fewer: with {size} and "
                f"{certificate.samples} samples {reason}; {_WHAT_TO_DO}"
            )
            return Certificate(None, reason, samples=certificate.samples)
    return _known_sizes(certificate, sizes)


def _known_sizes(certificate: Certificate, sizes: Collection[int]) -> Certificate:
    return replace(certificate, sizes=certificate.sizes | set(sizes))


_WHAT_TO_DO = (
    "use a mean or a sum over samples or labels, or give loss_weight(part), which counts what the loss of a part is a "
    "mean over, or offload only"
)


_LARGEST_PROBE = 8
_ENOUGH_FOR_BATCHNORM = 3
_BATCHNORM = "BatchNorm in train mode takes its statistics over the whole batch"
_BATCHNORM_FIX = "offload only, or choose batchnorm='ghost'"
_COUNTS = (
    "each call of the step changes {}, which has a part in what it computes, and sub-batches would change it more often"
)
_ODD = (
    "the gradients of {} do not grow as the loss does: a gradient hook or an autograd.Function adds to them, or clamps "
    "them; offload only"
)
_DRAWN = (
    "each sub-batch draws its own random numbers by {}: where one is for the whole batch, as a scale or a mixing "
    "ratio, draw it in the DataLoader, or in on_train_batch_start"
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

    The operations behind the loss say what it is a mean or a sum over (:mod:`retime.foundations.parts.loss_head`),
    unless ``loss_weight`` does, and gradients have to agree: the step runs on a few samples at once and on uneven parts
    of them, about 3 * ``samples`` samples forward and backward, twice where the batch has more. Where single precision
    cannot tell, it does so again in float64. Gradients are kept as sketches of 1024 numbers a parameter, so the probe
    needs the memory of one small step and a copy of the parameters.

    It leaves no trace: see :class:`~retime.foundations.preserve_state.stand_ins.ScratchModel`. Dropout is off while it
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
        among: a former certificate, whose weights have to hold still.
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
    given = None if loss_weight is None else Weighting("count", loss_weight)
    if layers and not ghost:
        samples = min(samples, _ENOUGH_FOR_BATCHNORM)
    examiner = _Examiner(step, batch, model, min(samples, total), split, layers if ghost else [], read_only)
    certificate = examiner.examine(None, given)
    unsure = certificate.weighting is None and (given is not None or not examiner.unknown) and (ghost or not layers)
    if unsure and all(p.device.type != "mps" for p in model.parameters()):
        certificate = examiner.examine_precisely(given) or certificate
    if certificate.separable and among is not None and _weightings(among) != _weightings(certificate):
        now, before = (" and ".join(sorted(map(str, _weightings(one)))) for one in (certificate, among))
        reason = f"the loss is a {now} now, and was a {before}; offload only"
        return Certificate(None, reason, samples=certificate.samples)
    if certificate.separable:
        return check_sizes(step, batch, model, certificate, {total}, split=split, given=given is not None, ghost=ghost)
    if layers and not ghost:
        reason = f"{_BATCHNORM}: {_some(layers)}; {_BATCHNORM_FIX}"
        return replace(certificate, reason=reason, layers=tuple(layers))
    return certificate


def _weightings(certificate: Certificate) -> set[Weighting | None]:
    return {certificate.weighting, *certificate.alternatives}


class _Examiner:
    def __init__(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        model: nn.Module,
        samples: int,
        split: Split,
        ghosts: Sequence[str],
        read_only: bool,
    ) -> None:
        self._step, self._model, self._split, self._samples = step, model, split, samples
        self._total = total = samples_in(batch, split)
        first, *others = [batch] if total == samples else split(batch, samples)
        self._batches = [first, *[part for part in others if samples_in(part, split) == samples][-1:]]
        self._ghosts, self._read_only = ghosts, read_only
        self.unknown = False  # operations did not tell what the loss is of its samples
        self._zeros: list[str] = []
        self._heads: dict[str, Weighting] = {}  # of the scalars that the step returns, by place
        self._look: tuple[Head | None, str, tuple[bool | int | float | None, ...]] | None = None

    def examine_precisely(self, given: Weighting | None) -> Certificate | None:
        """Examine in float64; None where the step does not run in it."""
        try:
            return self.examine(torch.float64, given)
        except Exception:  # whatever a step says to tensors of another type
            return None

    def examine(self, dtype: torch.dtype | None, given: Weighting | None) -> Certificate:
        fix = partial(fix_statistics, self._model, self._ghosts)
        with ScratchModel(self._model, dtype, fix, read_only=self._read_only, step=self._step) as scratch:
            prober = Prober(self._step, scratch, dtype, self._split)
            probes: list[Probe] = []
            for number, batch in enumerate(self._batches):
                names = range(number * self._samples, (number + 1) * self._samples)
                try:
                    probe = prober.probe(batch, names, pairs=1 if number else 2)
                except (RuntimeError, AssertionError, IndexError) as error:
                    if self._samples == self._total or is_out_of_memory(error):
                        raise
                    reason = f"the step does not run on {self._samples} of {self._total} samples ({first_line(error)})"
                    return Certificate(None, f"{reason}; offload only", samples=self._samples)
                if probe.failure:
                    return Certificate(None, probe.failure, samples=self._samples)
                if not number or probe.full.tells:
                    probes.append(probe)
            head, why, reads = self._look = self._look or self._looked(prober)
            self.unknown = head is None
            if given is not None:
                candidates, why = [given], ""
            else:
                candidates = [Weighting("mean")] if head is None else list(head.weightings) or [Weighting("mean")]
            concluded = _concluded(
                probes, candidates, prober.epsilon, self._samples, self._heads, given=given is not None, unknown=why
            )
            if concluded.separable and self._zeros:
                concluded = self._with_all_terms(prober, candidates, concluded)
            if concluded.separable:
                counters = prober.depends_on_counters(self._batches[0], range(self._samples), probes[0].full)
                if counters:
                    reason = f"{_COUNTS.format(counters)}; offload only"
                    concluded = Certificate(None, reason, samples=self._samples)
            if concluded.separable and (
                odd := prober.not_in_proportion(self._batches[0], range(self._samples), probes[0].full)
            ):
                concluded = Certificate(None, _ODD.format(_some(odd)), samples=self._samples)
            if concluded.weighting is not None and set(probes[0].full.scalars.values()) != {probes[0].full.loss}:
                noisy = prober.probe_with_noise(self._batches[0], range(self._samples))
                if noisy is not None and _is_comparable(noisy, probes[0], concluded):
                    concluded = _with_outputs(concluded, concluded.weighting, [*probes, noisy], self._heads)
        if not concluded.separable:
            return concluded
        recurrent = [one for one in self._model.modules() if isinstance(one, nn.RNNBase)]
        drops = any(one.training and one.dropout > 0 for one in recurrent)
        notes = [_RANDOM] if prober.random or drops else []
        hooked = [name for name, parameter in self._model.named_parameters() if tensor_hooks(parameter)]
        if hooked:
            notes.append(f"gradient hooks run once for each sub-batch: {_some(hooked)}")
        drawn = _DRAWN.format(_some(list(dict.fromkeys(prober.for_all)))) if prober.for_all else ""
        sizes = frozenset(size for case in probes[0].cases for size in (sum(case.samples), *case.samples))
        constants = head is not None and head.compares
        return replace(concluded, notes=tuple(notes), drawn=drawn, sizes=sizes, reads=reads, constants=constants)

    def _with_all_terms(self, prober: Prober, candidates: list[Weighting], concluded: Certificate) -> Certificate:
        """The same, if its weights hold too where terms that count for nothing yet count."""
        try:
            kind = partial(_ZeroWeights, [], True)
            perturbed = prober.probe(self._batches[0], range(self._samples), kind=kind)
        except Exception as error:  # whatever a step says to other numbers than its own
            reason = f"a term of its loss is multiplied by 0, and it fails where that is another ({first_line(error)})"
            return Certificate(None, reason, samples=self._samples)
        if perturbed.failure:
            return Certificate(None, perturbed.failure, samples=self._samples)
        again = _concluded([perturbed], candidates, prober.epsilon, self._samples, {}, given=True)
        if again.separable:
            return concluded
        reason = f"the loss has a term that is multiplied by 0 now, and where it is not, {again.reason}"
        return replace(again, reason=reason)

    def _looked(self, prober: Prober) -> tuple[Head | None, str, tuple[bool | int | float | None, ...]]:
        """Head of the loss, which says what it is of its samples, or why that is not known, and what the step reads."""
        batch, custom = self._batches[0], self._split is not split_batch
        fewer = self._split(batch, self._samples // 2 + 1 if self._samples > 2 else 1)[0]
        counts = [samples_in(part, self._split) if custom else None for part in (batch, fewer)]
        try:
            kind = partial(_ZeroWeights, self._zeros, False)
            large = record(prober.recorded, batch, kind=kind, samples=counts[0])
            reads = tuple(one if isinstance(one, bool | int | float) else None for one in large.recorder.values)
            small = record(prober.recorded, fewer, kind=Recorder, samples=counts[1])
            self._heads = dict(_heads_of_scalars(large, small))
            altered = record_altered(prober.recorded, batch, large, kind=Recorder, samples=counts[0])
            return head_of_loss(large, small, altered), "", reads
        except NotUnderstoodError as error:
            return None, str(error), reads
        except Exception as error:  # whatever a step says to being watched
            return None, f"its operations cannot be followed ({first_line(error)})", (None,)


def _heads_of_scalars(large: RecordedRun, small: RecordedRun) -> Iterator[tuple[str, Weighting]]:
    """Weightings of samples in numbers that a step returns, by place, as far as their operations tell."""
    few = tensors_of(small.output, "output")
    for place, tensor in tensors_of(large.output, "output").items():
        try:
            if not tensor.dim() and place in few:
                head = head_of((large, tensor), (small, few[place]))
                yield place, head.weightings[0]
        except (NotUnderstoodError, IndexError):
            continue


def _concluded(
    probes: list[Probe],
    candidates: Sequence[Weighting],
    epsilon: float,
    samples: int,
    heads: Mapping[str, Weighting],
    *,
    given: bool = False,
    unknown: str = "",
) -> Certificate:
    """Certificate that follows from probes of weightings, all of which have to fit.

    Args:
        heads: what scalars are of their samples, as operations tell.
        given: weightings are the user's.
        unknown: why operations do not tell what the loss is of its samples.
    """
    verdicts = [judge(weighting, probes, epsilon) for weighting in candidates]
    worst = max(verdicts, key=lambda verdict: verdict.error)
    changed = sorted({name for probe in probes for name in probe.changed_differently(worst.tolerance)})
    if changed:
        reason = (
            f"each forward pass changes {_some(changed)}, so sub-batches would change it several times; offload only"
        )
    elif unknown:
        reason = f"how losses of sub-batches add up cannot be told from the loss: {unknown}; {_WHAT_TO_DO}"
    elif all(verdict.fits for verdict in verdicts):
        weighting, *others = candidates
        certificate = Certificate(weighting, "", (), worst.error, worst.tolerance, samples, tuple(others))
        return _with_outputs(certificate, weighting, probes, heads)
    else:
        reason = _why_not(probes, worst, given, samples)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in changed)) or worst.layers
    return Certificate(None, reason, layers, worst.error, worst.tolerance, samples)


def _with_outputs(
    certificate: Certificate, weighting: Weighting, probes: Sequence[Probe], heads: Mapping[str, Weighting]
) -> Certificate:
    """The same, with what operations and probes tell of the scalars that the step returns."""
    outputs = scalar_weightings(probes, [weighting, Weighting("mean"), Weighting("sum")], heads, certificate.tolerance)
    unclear = tuple(place for place in probes[0].full.scalars if place not in outputs)
    examples = tuple(_example(probe, case, weighting) for probe in probes for case in probe.cases)
    told = frozenset(place for place, head in heads.items() if outputs.get(place) == head)
    return replace(certificate, outputs=outputs, told=told, unclear=unclear, examples=examples)


def _is_comparable(noisy: Probe, plain: Probe, certificate: Certificate) -> bool:
    """Check whether each sample had the same noise in all runs, and all scalars still have a value."""
    runs = [noisy.full, *(run for case in noisy.cases for run in case.runs)]
    finite = {place for place, value in plain.full.scalars.items() if math.isfinite(value)}
    assert certificate.weighting is not None
    return all(
        finite <= {place for place, value in run.scalars.items() if math.isfinite(value)} for run in runs
    ) and all(
        loss_difference(noisy.full, case, certificate.weighting.of(case.parts, case.samples)) <= certificate.tolerance
        for case in noisy.cases
    )


def _example(probe: Probe, case: Case, weighting: Weighting) -> Example:
    weights = weighting.of(case.parts, case.samples)
    return Example(probe.full.scalars, tuple(run.scalars for run in case.runs), tuple(case.samples), tuple(weights))


def _why_not(probes: list[Probe], best: Verdict, given: bool, samples: int) -> str:
    if not probes[0].full.gradients:
        return "the loss reaches no parameter of the model, so there is nothing to compare"
    if math.isinf(best.error):
        return f"the gradient of {samples} samples, or of parts of them, is 0 or has no value; offload only"
    text = f"the gradient of {samples} samples differs by {best.error:.1e} from the best sum over its parts"
    if fitted_error(probes) <= best.tolerance:
        return (
            f"{text}, though some weights would fit: the loss is a mean over something that cannot be counted in the "
            "batch; give loss_weight(part), which counts it, or offload only"
        )
    if given:
        text += ", weighed as was given"
    return (
        f"{text}, most in {_some(best.layers)}: samples influence one another, as in contrastive losses, or the step "
        "keeps a state between calls; offload only"
    )


def _some(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(name or "the model itself" for name in names[:shown]) + more
