"""Runs of a step on a few samples and on parts of them, with gradients kept as sketches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retime.foundations.parts import (
    Recorder,
    Split,
    Weighting,
    leaves_of,
    loss_of,
    map_leaves,
    replaced_tensors,
    samples_in,
)
from retime.foundations.preserve_state import ScratchModel, seed_all
from retime.foundations.torch_private.engine import run_backward
from retime.mechanisms.memory_budget.separability.watch import NoDropout, SampleNoise, Watch

_GROWN = 2.0**10
"""Times as large as it is, a loss has gradients that are that many times as large, without any rounding."""
_SKETCH = 1024
_BLOCK = 256 * _SKETCH
_OFTEN = 2**10 * 3**2 * 5**4 * 7 * 11 * 13
_LATER = (25199, 25200, 25201, _OFTEN - 1, _OFTEN, _OFTEN + 1)
"""Late calls of a step, soon and very late: the last is a multiple of all numbers up to 16, of powers of two up to
1024, of 500, 1000 and 5000, at which a step may do something, and those beside it, as it may count first."""


@dataclass
class Run:
    """Results of one run of the step: sketches of gradients by parameter, scalars, and tensors it had changed.

    Attributes:
        counters: numbers in attributes and in names outside of the model that it changed.
    """

    gradients: dict[str, Tensor]
    loss: float
    scalars: dict[str, float]
    changed: dict[str, Tensor] = field(default_factory=dict)
    counters: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tells(self) -> bool:
        """Return whether its loss has a value and a gradient; a mean over labels all of which are ignored has none."""
        return math.isfinite(self.loss) and any(bool(gradient.any()) for gradient in self.gradients.values())


@dataclass
class Case:
    """The parts of a probed batch, run one after the other without a restart, as sub-batches will be."""

    parts: list[Any]
    samples: list[int]
    runs: list[Run]


@dataclass
class Probe:
    """One small batch, run whole and in parts of several sizes.

    Attributes:
        failure: why a part did not run to its end; empty if all did.
        moving: parameters and buffers that are written as they are, by chance: see :meth:`Prober._moving`.
    """

    full: Run
    cases: list[Case] = field(default_factory=list)
    failure: str = ""
    moving: list[str] = field(default_factory=list)

    def changed_differently(self, tolerance: float) -> list[str]:
        """Parameters and buffers that are not the same after the parts as after the whole, but for rounding.

        Args:
            tolerance: relative; a power iteration, of spectral norm for one, changes little when it has converged.
        """
        changed = list(self.moving)
        for case in self.cases:
            after: dict[str, Tensor] = {}
            for run in case.runs:
                after |= run.changed
            for name in {**self.full.changed, **after}:
                whole, parts = self.full.changed.get(name), after.get(name)
                if whole is None or parts is None or not _alike(whole, parts, tolerance):
                    changed.append(name)
        return changed


class Prober:
    """Runs a step on copies of its model.

    Attributes:
        epsilon: of the coarsest type.
        random: random numbers were drawn.
        for_all: by whom, where they are none of single samples.
    """

    def __init__(
        self, step: Callable[[Any], Any], scratch: ScratchModel, dtype: torch.dtype | None, split: Split
    ) -> None:
        self._step, self._scratch, self._dtype, self._split = step, scratch, dtype, split
        self.epsilon = 0.0
        self.random = self._reentrant = False
        self.for_all: list[str] = []
        self._noise: SampleNoise | None = None
        self._factor = 1.0  # of the loss, where gradients are computed
        self._kind: Callable[[Any], Recorder] | None = None

    def probe_with_noise(self, batch: Any, names: Sequence[int]) -> Probe | None:
        """Probe with samples that modules give unlike values for; None where the step does not run so."""
        self._noise = SampleNoise()
        try:
            probe = self.probe(batch, names)
        except Exception:  # whatever a step says to other values than its own
            return None
        finally:
            self._noise = None
        return None if probe.failure else probe

    def probe(
        self, batch: Any, names: Sequence[int], pairs: int = 2, kind: Callable[[Any], Recorder] | None = None
    ) -> Probe:
        """Run the step on a small batch and on uneven parts of it.

        Args:
            names: a number for each sample, which seeds its random numbers.
            pairs: in how many ways to cut the batch.
            kind: of recorder that each run is in.

        Raises:
            ValueError: the loss needs no gradient.
            Exception: whatever the step raises on the whole of it.
        """
        samples = samples_in(batch, self._split)
        names, self._kind = list(names)[:samples], kind
        self._scratch.restart()
        probe = Probe(self._run(batch, names))
        for sub_batch in dict.fromkeys((samples // 2 + 1, samples - 1)[:pairs]) if samples > 2 else (1,):
            parts = list(self._split(batch, sub_batch))
            case = Case(parts, [samples_in(part, self._split) for part in parts], [])
            self._scratch.restart()
            start = 0
            for part, size in zip(parts, case.samples, strict=True):
                try:
                    case.runs.append(self._run(part, names[start : start + size]))
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    why = first_line(error)
                    probe.failure = f"the step runs on {samples} samples but not on {size} of them ({why})"
                    return probe
                start += size
            probe.cases.append(case)
        probe.moving = self._moving(batch, probe)
        return probe

    def _moving(self, batch: Any, probe: Probe) -> list[str]:
        """Find what was written with the value that it had, and would go on from part to part with another one.

        Such as a teacher that is its student so far, or a power iteration that has converged.
        """
        names = [name for name, one in probe.full.changed.items() if one.is_floating_point() and one.numel()]
        self._scratch.restart()
        before = {name: self._scratch.value_of(name).clone() for name in names}
        still = [name for name in names if _alike(before[name], probe.full.changed[name], 1e-5)]
        ends: list[dict[str, Tensor]] = []
        for pieces in ([batch], probe.cases[0].parts) if still else ():
            self._scratch.restart()
            self._scratch.disturb(still)
            try:
                for piece in pieces:
                    self._run(piece, range(samples_in(piece, self._split)))
            except Exception:  # whatever a step says to other values than its own
                return still
            ends.append({name: self._scratch.value_of(name).clone() for name in still})
        return [name for name in still if not _alike(ends[0][name], ends[1][name], 1e-4)]

    def recorded(self, batch: Any) -> Any:
        """Output of one run, of which only the operations matter."""
        self._scratch.restart()
        seed_all()
        return map_leaves(self._step(batch), lambda _, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def depends_on_counters(self, batch: Any, names: Sequence[int], full: Run) -> str:
        """Numbers that each call of the step changes and that have a part in what it computes; empty if none has."""
        self._kind = None
        for value in _LATER if full.counters else ():
            self._scratch.restart()
            for key in full.counters:
                self._scratch.bind(key, value)
            try:
                run, gradients = self._run(batch, list(names)), full.gradients
                same = run.loss == full.loss and run.gradients.keys() == gradients.keys()
                same = same and all(torch.equal(one, gradients[name]) for name, one in run.gradients.items())
            except Exception:  # whatever a step says to having been called so often
                same = False
            if not same:
                return ", ".join(dict.fromkeys(name for _, name in full.counters))
        return ""

    def not_in_proportion(self, batch: Any, names: Sequence[int], full: Run) -> list[str]:
        """Parameters whose gradients do not grow as the loss does: something is added to them, or they are clamped."""
        self._scratch.restart()
        self._kind, self._factor = None, _GROWN
        try:
            grown = self._run(batch, list(names)).gradients
        finally:
            self._factor = 1.0
        tolerance = _ROUNDINGS * self.epsilon
        there = ((name, one, grown.get(name)) for name, one in full.gradients.items())
        return [name for name, one, larger in there if larger is None or not _alike(_GROWN * one, larger, tolerance)]

    def _run(self, batch: Any, names: Sequence[int]) -> Run:
        before = self._scratch.numbers()
        seed_all()  # for each part too: the noise of a sample depends on its name and on the draws before
        # parts are views, and a step may write into its batch
        batch = replaced_tensors(batch, lambda one: one.to(self._dtype if one.is_floating_point() else None, copy=True))
        parameters = self._scratch.parameters()
        try:
            output, gradients, watch = self._gradients(batch, names, parameters)
        except RuntimeError as error:
            if self._reentrant or "checkpoint" not in str(error).lower():
                raise
            self._reentrant = True  # reentrant checkpoints cannot be asked for chosen gradients
            self._scratch.restart()
            output, gradients, watch = self._gradients(batch, names, self._scratch.parameters())
        self.epsilon = max(self.epsilon, watch.epsilon)
        self.for_all = self.for_all or watch.for_all
        sketches = {name: sketch(gradient) for name, gradient in gradients.items()}
        after = self._scratch.numbers()
        counters = [key for key in after if after[key] != before.get(key) and after[key] == after[key]]
        loss, scalars = float(loss_of(output).detach()), scalars_of(output)
        return Run(sketches, loss, scalars, self._scratch.changed(), counters)

    def _gradients(
        self, batch: Any, names: Sequence[int], parameters: list[tuple[str, Tensor, Tensor]]
    ) -> tuple[Any, dict[str, Tensor], Watch]:
        recorder = nullcontext() if self._kind is None else self._kind(batch)
        noise = nullcontext() if self._noise is None else self._noise.of(names)
        with torch.enable_grad(), Watch(names) as watch, NoDropout() as dropout:
            with noise, recorder:
                output = self._step(batch)
            self.random |= watch.drawn or dropout.seen
            loss = loss_of(output)
            if not loss.requires_grad:
                raise ValueError("the step's loss needs no gradient: return the loss undetached, and run no backward")
            if self._reentrant:
                return output, self._by_backward(loss, parameters), watch
            # the originals too: a step may hold on to them outside of the model
            targets = [*((name, twin) for name, _, twin in parameters), *((name, old) for name, old, _ in parameters)]
            of_targets = _backward(loss, tuple(tensor for _, tensor in targets), self._factor)
        gradients: dict[str, Tensor] = {}
        for (name, _), gradient in zip(targets, of_targets, strict=True):
            if gradient is not None:
                gradients[name if name not in gradients else f"{name} (the original)"] = gradient
        return output, gradients, watch

    def _by_backward(self, loss: Tensor, parameters: list[tuple[str, Tensor, Tensor]]) -> dict[str, Tensor]:
        originals = [old for _, old, _ in parameters]
        try:
            for old in originals:
                old.requires_grad_(False)
            _backward(loss, (), self._factor)
        finally:
            for old in originals:
                old.requires_grad_(True)
        gradients = {name: twin.grad for name, _, twin in parameters if twin.grad is not None}
        for _, _, twin in parameters:
            twin.grad = None
        return gradients


def _backward(loss: Tensor, targets: tuple[Tensor, ...], factor: float) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, or without targets ``loss.backward()``, but the modes of Python stay on meanwhile.

    The public functions hand themselves to a TorchFunctionMode, which is off while it handles them: layers that are
    recomputed in the backward pass would have their dropout back.
    """
    arguments = ((loss,), (torch.full_like(loss, factor),), False, False, targets)
    return tuple(run_backward(*arguments, allow_unreachable=True, accumulate_grad=not targets) or ())


def first_line(error: Exception) -> str:
    """Line that a step says where it fails, with the kind of error; without "; ", behind which reports have advice."""
    line = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {line.replace('; ', ', ')}"


def scalars_of(output: Any) -> dict[str, float]:
    """The scalars in what a step returns, by place (``output['loss']``)."""
    scalars: dict[str, float] = {}
    for place, leaf in leaves_of(output, "output"):
        if isinstance(leaf, Tensor) and leaf.dim() == 0 and not leaf.is_complex():
            scalars[place] = float(leaf.detach())
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            scalars[place] = float(leaf)
    return scalars


def sketch(gradient: Tensor) -> Tensor:
    """A gradient as at most 1024 float64 numbers on the CPU whose sum of squares is close to its own.

    Entries are added up with signs drawn at random (a count sketch), so that the sketch of a sum is the sum of the
    sketches. The same signs are drawn for all gradients of a size.
    """
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    flat = gradient.detach().reshape(-1)
    if flat.numel() <= _SKETCH:
        return flat.to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(flat.numel())
    signs = torch.randint(0, 2, (2 * _BLOCK,), generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(flat.device)
    total = torch.zeros(_SKETCH, dtype=torch.float64)
    for block in torch.split(flat, _BLOCK):
        start = int(torch.randint(0, _BLOCK, (), generator=generator))
        signed = block * signs[start : start + block.numel()]
        rows = F.pad(signed, (0, -signed.numel() % _SKETCH)).reshape(-1, _SKETCH)
        total += rows.sum(0, dtype=torch.float64 if rows.device.type != "mps" else None).to("cpu", torch.float64)
    return total


def _alike(one: Tensor, two: Tensor, tolerance: float) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, two)
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance * float(one.abs().max() if one.numel() else 0))


# Whether the gradients of parts, weighed so, are the gradient of the whole, as far as the precision can tell.

_ROUNDINGS = 64
"""A gradient's rounding error, in units of the precision: single-precision networks measure 1 to 20 of them."""
_FINEST = 1e-10
"""No smaller difference is asked for: parts that differ by less are one and the same in any training."""
_LAYERS_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """Verdict on how well one weighting fits.

    Attributes:
        error: largest relative difference of gradients, over all probes and cases; of losses, if that is larger.
        tolerance: what rounding may do.
        layers: parameters whose gradients differ most, worst first.
    """

    fits: bool
    error: float
    tolerance: float
    layers: tuple[str, ...] = ()


def judge(weighting: Weighting, probes: Sequence[Probe], epsilon: float) -> Verdict:
    """Compare the weighted sums with the whole, in all and parameter by parameter.

    A single parameter may differ by the square root of the precision, since its gradient may be small against the
    others' rounding; one parameter that differs by more is enough for a no.

    Args:
        epsilon: of the coarsest type that the step computes in.
    """
    tolerance = max(_ROUNDINGS * epsilon, _FINEST)
    floor = math.sqrt(epsilon)
    error = 0.0
    singles: dict[str, float] = {}
    for probe in probes:
        for case in probe.cases:
            try:
                weights = weighting.of(case.parts, case.samples)
            except LookupError:
                return Verdict(False, math.inf, tolerance)
            whole, rest, each = _differences(probe.full, case, weights, floor)
            if not math.isfinite(whole) or not whole:
                return Verdict(False, math.inf, tolerance)
            error = max(error, rest, loss_difference(probe.full, case, weights))
            for name, value in each.items():
                singles[name] = max(singles.get(name, 0.0), value)
    worst_single = max(singles.values(), default=math.inf)
    layers = tuple(sorted(singles, key=lambda name: -singles[name])[:_LAYERS_NAMED])
    # where rounding is as large as the gradient, nothing can be certified
    fits = error <= tolerance < 0.1 and worst_single <= _ROUNDINGS * floor
    return Verdict(fits, error, tolerance, layers)


def fitted_error(probes: Sequence[Probe]) -> float:
    """The relative difference that remains with the best weights, whatever they count."""
    worst = 0.0
    for probe in probes:
        for case in probe.cases:
            shapes = {name: gradient for run in (probe.full, *case.runs) for name, gradient in run.gradients.items()}
            if not shapes:
                return math.inf
            target, *columns = (
                torch.cat([run.gradients.get(name, torch.zeros_like(shapes[name])) for name in sorted(shapes)])
                for run in (probe.full, *case.runs)
            )
            matrix = torch.stack(columns, 1)
            if not (torch.isfinite(matrix).all() and torch.isfinite(target).all()) or not target.norm():
                return math.inf
            weights = torch.linalg.lstsq(matrix, target[:, None]).solution
            worst = max(worst, float((matrix @ weights - target[:, None]).norm() / target.norm()))
    return worst


def is_out_of_memory(error: Exception) -> bool:
    """Return whether this is torch's error of an allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def scalar_weightings(
    probes: Sequence[Probe], candidates: Sequence[Weighting], heads: Mapping[str, Weighting], tolerance: float
) -> dict[str, Weighting]:
    """Return how scalars add up from parts, by their place in the step's output. Scalars that do not are left out.

    Args:
        candidates: tried one after the other, behind what ``heads`` says of a place; of one that is 0, a mean first.
    """
    weightings = {}
    runs = [run for probe in probes for run in (probe.full, *(one for case in probe.cases for one in case.runs))]
    for place in probes[0].full.scalars:
        zero = [] if any(run.scalars.get(place) for run in runs) else [Weighting("mean")]
        for weighting in ([heads[place]] if place in heads else zero) + list(candidates):
            if all(_adds_up(place, probe.full, case, weighting, tolerance) for probe in probes for case in probe.cases):
                weightings[place] = weighting
                break
    return weightings


def _adds_up(place: str, full: Run, case: Case, weighting: Weighting, tolerance: float) -> bool:
    try:
        weights = weighting.of(case.parts, case.samples)
    except LookupError:
        return False
    terms = [
        weight * run.scalars.get(place, math.nan) for weight, run in zip(weights, case.runs, strict=True) if weight
    ]
    whole = full.scalars.get(place, math.nan)
    return abs(math.fsum(terms) - whole) <= tolerance * (abs(whole) + math.fsum(map(abs, terms)))


def _differences(full: Run, case: Case, weights: list[float], floor: float) -> tuple[float, float, dict[str, float]]:
    """The norm of the whole gradient, the relative difference of all, and that of each parameter."""
    names = {name for run in (full, *case.runs) for name in run.gradients}
    differences, sizes, wholes = {}, {}, {}
    for name in names:
        whole = full.gradients.get(name, torch.zeros((), dtype=torch.float64))
        difference, size = whole.clone(), float(whole.norm())
        for weight, run in zip(weights, case.runs, strict=True):
            if weight and name in run.gradients:  # a loss over nothing has no value, and weight 0
                term = weight * run.gradients[name]
                difference, size = difference - term, size + float(term.norm())
        differences[name], sizes[name], wholes[name] = float(difference.norm()), size, float(whole.norm())
    whole_norm = math.hypot(*wholes.values())
    if not whole_norm or not math.isfinite(whole_norm):
        return whole_norm, math.inf, {}
    each = {name: differences[name] / (sizes[name] + floor * whole_norm) for name in names}
    bad = [value for value in each.values() if math.isnan(value)]
    return whole_norm, math.inf if bad else math.hypot(*differences.values()) / whole_norm, each


def loss_difference(full: Run, case: Case, weights: list[float]) -> float:
    """Return how far the weighted sum of the parts' losses is from the whole's, relative to their sizes."""
    terms = [weight * run.loss for weight, run in zip(weights, case.runs, strict=True) if weight]
    scale = abs(full.loss) + math.fsum(map(abs, terms))
    return abs(math.fsum(terms) - full.loss) / scale if scale else 0.0
