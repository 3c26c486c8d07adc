"""One seed under one mechanism: the same result as plain training, or a refusal, or a failure that says where."""

import math
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contract.random_models.generator import generate
from contract.random_models.mechanisms import Mechanism
from contract.random_models.model import build
from contract.random_models.spec import Spec
from contract.random_models.training import Way
from contract.record import differences

SHOWN = 6
NEAR = 1e-8
"""In float64: less is rounding, whatever the model makes of it."""
BY_VALUE = 1e-4
"""How near a number that a step reads out of tensors must come: it is judged by its values in the first batch."""
ILL = 1e-6
"""A model whose own rounding shows as much tells nothing."""
_PLAIN: dict[str, Any] = {}
"""Plain runs by spec; several mechanisms are compared with the same."""
_KEPT = 600


@dataclass(frozen=True)
class Verdict:
    """What became of a seed.

    Attributes:
        kind: "same", "refused", "failed"; "void" where plain training fails too, or rounding hides everything.
        on: the mechanism was on, not only present.
        text: the refusal or the failure.
    """

    kind: str
    on: bool = False
    text: str = ""


class _Void(Exception):  # noqa: N818
    """Plain training fails."""


def check(mechanism: Mechanism, seed: int) -> Verdict:
    """Generate, train plainly and under the mechanism, compare."""
    return check_spec(mechanism, mechanism.fit(generate(seed)))


def check_spec(mechanism: Mechanism, spec: Spec) -> Verdict:
    """The same for a given spec."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            plain = _plain(mechanism, spec)
        except _Void as why:
            return Verdict("void", text=str(why))
        way = mechanism.way()
        try:
            ours = mechanism.train(spec, way)
        except Exception as error:
            return _refusal(mechanism, spec, way, error)
        try:
            near = 0.0 if mechanism.exact or not way.rounds else _near(mechanism, spec, plain)
        except _Void as why:
            return Verdict("void", text=str(why))
    if way.told:
        plain, ours = (_but_told(left, way.told) for left in (plain, ours))
    if way.by_value:
        ours = _as_near_as_judged(plain, ours, way.by_value)
    differing = sorted(differences(plain, ours, near))
    if differing:
        return Verdict(
            "failed", way.on, "\n".join([*differing[:SHOWN], f"({len(differing)} differences, tolerance {near:.1e})"])
        )
    return Verdict("same", way.on, way.note)


def _but_told(left: dict[str, Any], told: frozenset[str]) -> dict[str, Any]:
    """Without logged numbers that a warning says to differ."""

    def others(logged: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in logged.items() if name not in told}

    return left | {"logged": others(left["logged"]), "shown": list(map(others, left["shown"]))}


def _as_near_as_judged(plain: dict[str, Any], ours: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """With the plain run's numbers of these names, where ours are as near as the first batch was held to them."""

    def judged(logged: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        both = names & logged.keys() & other.keys()
        close = {name for name in both if math.isclose(float(logged[name]), float(other[name]), rel_tol=BY_VALUE)}
        return logged | {name: other[name] for name in close}

    shown = [judged(*pair) for pair in zip(ours["shown"], plain["shown"], strict=True)]
    return ours | {"logged": judged(ours["logged"], plain["logged"]), "shown": shown}


def _plain(mechanism: Mechanism, spec: Spec) -> Any:
    key = f"{mechanism.train.__name__} {spec}"
    if key not in _PLAIN:
        while len(_PLAIN) >= _KEPT:
            del _PLAIN[next(iter(_PLAIN))]
        try:
            _PLAIN[key] = mechanism.train(spec, Way())
        except Exception as error:
            _PLAIN[key] = _Void(f"{type(error).__name__}: {error}")
    if isinstance(_PLAIN[key], _Void):
        raise _PLAIN[key]
    return _PLAIN[key]


def _near(mechanism: Mechanism, spec: Spec, plain: Any) -> float:
    """What the model makes of rounding: the samples of each batch in other orders."""
    noise = 0.0
    for order in (lambda samples: samples.flip(0), lambda samples: samples.roll(1, 0)):
        noise = max(noise, *_gaps(plain, mechanism.train(spec, Way(), order)))
    if not noise < ILL:
        raise _Void(f"ill-conditioned: the order of samples changes the result by {noise:.1e}")
    return max(NEAR, 100 * noise)


def _gaps(left: Any, right: Any) -> Iterator[float]:
    """How far numbers are apart, relative where they are large."""
    if isinstance(left, Tensor):
        if left.numel() and left.is_floating_point():
            gap = (left.double() - right.double()).abs() / (1 + left.double().abs())
            yield math.inf if gap.isnan().any() else gap.max().item()
    elif isinstance(left, dict):
        for name, value in left.items():
            yield from _gaps(value, right[name])
    elif isinstance(left, list):
        for one, two in zip(left, right, strict=True):
            yield from _gaps(one, two)


def _refusal(mechanism: Mechanism, spec: Spec, way: Way, error: Exception) -> Verdict:
    text = f"{type(error).__name__}: {error}"
    if any(part in str(error) for part in mechanism.raises):
        return Verdict("refused", text=text)
    frames = list(traceback.walk_tb(error.__traceback__))
    where = frames[-1][0].f_globals.get("__name__", "")
    if not where.startswith("retime."):
        last = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return Verdict("failed", text=f"an error of {where or 'nowhere'}'s own\n{last}{text}")
    if not mechanism.late:
        if way.steps:
            return Verdict("failed", text=f"refused after {way.steps} steps: {text}")
        first = dict(build(spec).named_parameters())
        changed = [name for name, p in way.model.named_parameters() if not torch.equal(p, first[name])]
        if changed:
            return Verdict("failed", text=f"refused, but {', '.join(changed)} had changed by then: {text}")
    return Verdict("refused", text=text)
