"""Whether the gradients of parts, weighed so, are the gradient of the whole, as far as the precision can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retime.foundations.parts import Weighting
from retime.mechanisms.memory_budget.separability.probe import Case, Probe, Run

__all__ = ["Verdict", "fitted_error", "judge", "loss_difference", "scalar_weightings"]

_ROUNDINGS = 64
"""A gradient's rounding error, in units of the precision: single-precision networks measure 1 to 20 of them."""
_FINEST = 1e-10
"""No smaller difference is asked for: parts that differ by less are one and the same in any training."""
_LAYERS_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """How well one weighting fits.

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
            names = sorted(shapes)
            columns = [
                torch.cat(
                    [
                        torch.zeros(0, dtype=torch.float64),
                        *(run.gradients.get(name, torch.zeros_like(shapes[name])) for name in names),
                    ]
                )
                for run in (probe.full, *case.runs)
            ]
            target, matrix = columns[0], torch.stack(columns[1:], 1)
            if not columns[0].numel():
                return math.inf
            if not (torch.isfinite(matrix).all() and torch.isfinite(target).all()) or not target.norm():
                return math.inf
            weights = torch.linalg.lstsq(matrix, target[:, None]).solution
            worst = max(worst, float((matrix @ weights - target[:, None]).norm() / target.norm()))
    return worst


def scalar_weightings(
    probes: Sequence[Probe], candidates: Sequence[Weighting], tolerance: float
) -> dict[str, Weighting]:
    """By place in the step's output: how that scalar adds up from parts. Scalars that do not are left out."""
    found = {}
    for place in probes[0].full.scalars:
        for weighting in candidates:
            if all(_adds_up(place, probe.full, case, weighting, tolerance) for probe in probes for case in probe.cases):
                found[place] = weighting
                break
    return found


def _adds_up(place: str, full: Run, case: Case, weighting: Weighting, tolerance: float) -> bool:
    weights = weighting.of(case.parts, case.samples)
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
