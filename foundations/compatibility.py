"""What each mechanism owns of a training step, and so which of them go together.

Two that own the same thing are refused, with one sentence that says what to do. Whoever puts mechanisms together - a
strategy, a callback, an object for Accelerate - asks here. CONTRIBUTING.md shows this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Owned(Enum):
    """A part of a step that only one mechanism can have in its hands."""

    COMM_HOOK = "communication hook"
    OPTIMIZER_STEP = "`optimizer.step`"
    BACKWARD_PASSES = "number of backward passes"
    SAVED_TENSORS = "saved-tensor hooks"
    WEIGHT_GRADIENTS = "order of weight gradients"


class Together(Enum):
    """Outcome of two mechanisms in one step."""

    COMPOSE = "yes"
    ASIDE = "steps aside"
    """The first runs the plain way, and says so in one ``NoEffectWarning``."""
    REFUSED = "no"


@dataclass(frozen=True)
class _Rights:
    owns: frozenset[Owned]
    one_pass: bool = False
    """It counts on one backward pass a step."""
    holds_activations: bool = False
    """It keeps activations longer than a plain backward pass does."""
    ranks: bool | None = None
    """Whether it is for several ranks (True) or for one device (False) only."""


class Mechanism(Enum):
    """Mechanism that can be put together with others, by its name in messages."""

    BACKWARD_FUSION = "backward fusion"
    FORWARD_FUSION = "forward fusion"
    OUT_OF_ORDER = "out-of-order data parallel"
    OUT_OF_ORDER_IN_STEP = "out-of-order data parallel with cross_iteration=False"
    MEMORY_BUDGET = "a memory budget"
    HOST_REDUCTION = "a reduction in host memory"
    HOST_UPDATE = "an update on the host"
    PARALLEL_SCAN = "a parallel scan"
    PIPELINE = "a pipeline"
    TWO_STREAMS = "two streams on one device"
    USERS_HOOK = "a communication hook of your own"

    @classmethod
    def fusion(cls, mode: str) -> Mechanism:
        """Optimizer fusion in this mode."""
        return cls.FORWARD_FUSION if mode == "forward" else cls.BACKWARD_FUSION

    @classmethod
    def out_of_order(cls, *, cross_iteration: bool) -> Mechanism:
        """Out-of-order data parallel; only the cross-iteration wait takes the optimizer's step."""
        return cls.OUT_OF_ORDER if cross_iteration else cls.OUT_OF_ORDER_IN_STEP

    @property
    def owns(self) -> frozenset[Owned]:
        """Parts of a step that no other mechanism can have beside it."""
        return _RIGHTS[self].owns


_RIGHTS = {
    Mechanism.BACKWARD_FUSION: _Rights(
        frozenset({Owned.COMM_HOOK, Owned.OPTIMIZER_STEP, Owned.WEIGHT_GRADIENTS}), one_pass=True
    ),
    Mechanism.FORWARD_FUSION: _Rights(frozenset({Owned.OPTIMIZER_STEP})),
    Mechanism.OUT_OF_ORDER: _Rights(
        frozenset({Owned.COMM_HOOK, Owned.OPTIMIZER_STEP, Owned.WEIGHT_GRADIENTS}), holds_activations=True
    ),
    Mechanism.OUT_OF_ORDER_IN_STEP: _Rights(
        frozenset({Owned.COMM_HOOK, Owned.WEIGHT_GRADIENTS}), holds_activations=True
    ),
    Mechanism.MEMORY_BUDGET: _Rights(frozenset({Owned.BACKWARD_PASSES, Owned.SAVED_TENSORS})),
    Mechanism.HOST_REDUCTION: _Rights(frozenset({Owned.COMM_HOOK}), ranks=True),
    Mechanism.HOST_UPDATE: _Rights(frozenset({Owned.OPTIMIZER_STEP}), ranks=True),
    Mechanism.PARALLEL_SCAN: _Rights(frozenset()),
    Mechanism.PIPELINE: _Rights(frozenset(Owned), holds_activations=True),
    Mechanism.USERS_HOOK: _Rights(frozenset({Owned.COMM_HOOK}), ranks=True),
    Mechanism.TWO_STREAMS: _Rights(frozenset({Owned.WEIGHT_GRADIENTS}), holds_activations=True, ranks=False),
}
_BECAUSE = {
    Owned.OPTIMIZER_STEP: "{first} cannot join {second}, which fuses the optimizer already: drop one of the two",
    Owned.COMM_HOOK: "{first} and {second} both need DDP's one communication hook: drop one of the two",
    Owned.BACKWARD_PASSES: "{first} and {second} both divide batches into backward passes: drop one of the two",
    Owned.WEIGHT_GRADIENTS: "{first} and {second} both put weight gradients in an order: drop one of the two",
}
_HELD_ACTIVATIONS = (
    "weight gradients that wait keep activations which a memory budget counts as freed: drop one of the two"
)
_ONE_DEVICE = "two streams are for one device, and {} is for several ranks: drop one of the two"
_TWO_UPDATES = "{} and an update on the host both take the optimizer's step: drop one of the two"
_PARTS_OF_A_MODEL = "each rank of a pipeline has a part of the model only, which {} cannot work on: drop one of the two"
_SENTENCES = {
    **{
        frozenset({one, Mechanism.PIPELINE}): _PARTS_OF_A_MODEL.format(
            "another pipeline" if one is Mechanism.PIPELINE else one.value
        )
        for one, rights in _RIGHTS.items()
        if rights.owns
    },
    **{
        frozenset({one, Mechanism.HOST_UPDATE}): _TWO_UPDATES.format(one.value)
        for one, rights in _RIGHTS.items()
        if Owned.OPTIMIZER_STEP in rights.owns
    },
    **{
        frozenset({one, Mechanism.TWO_STREAMS}): _ONE_DEVICE.format(one.value)
        for one, rights in _RIGHTS.items()
        if rights.ranks
    },
    frozenset({Mechanism.BACKWARD_FUSION, Mechanism.TWO_STREAMS}): (
        "backward fusion updates a parameter as soon as its gradient is there, and two streams give weight gradients "
        "when the backward pass ends: use FuseOptimizer('forward'), OOOSingleDeviceStrategy(fuse_updates=True) or "
        "TwoStreamBackward(model, optimizer=optimizer)"
    ),
    frozenset({Mechanism.TWO_STREAMS, Mechanism.MEMORY_BUDGET}): _HELD_ACTIVATIONS,
    frozenset({Mechanism.BACKWARD_FUSION, Mechanism.MEMORY_BUDGET}): (
        "a memory budget may run several backward passes for one batch; use FuseOptimizer('forward')"
    ),
    frozenset({Mechanism.OUT_OF_ORDER, Mechanism.MEMORY_BUDGET}): _HELD_ACTIVATIONS,
    frozenset({Mechanism.OUT_OF_ORDER_IN_STEP, Mechanism.MEMORY_BUDGET}): _HELD_ACTIVATIONS,
    frozenset({Mechanism.BACKWARD_FUSION, Mechanism.USERS_HOOK}): (
        "backward fusion needs DDP's communication hook, and this strategy has one of its own: use "
        "FusedOptimizerDDPStrategy(ddp_comm_hook=...), or FuseOptimizer('forward')"
    ),
    frozenset({Mechanism.OUT_OF_ORDER, Mechanism.USERS_HOOK}): (
        "ooo_ddp is a communication hook itself and cannot take another: leave out ddp_comm_hook, or use "
        "strategy='ddp' or FusedOptimizerDDPStrategy(ddp_comm_hook=...)"
    ),
    frozenset({Mechanism.HOST_REDUCTION, Mechanism.USERS_HOOK}): (
        "a sum in host memory is a communication hook itself: leave out ddp_comm_hook, or use strategy='ddp' or "
        "reduce_on='device'"
    ),
}


def together(first: Mechanism, second: Mechanism) -> Together:
    """Decide what becomes of these two in one step, whichever was there before."""
    one, other = _RIGHTS[first], _RIGHTS[second]
    if one.owns & other.owns or {one.ranks, other.ranks} == {True, False}:
        return Together.REFUSED
    if (one.holds_activations and Owned.SAVED_TENSORS in other.owns) or (
        other.holds_activations and Owned.SAVED_TENSORS in one.owns
    ):
        return Together.REFUSED
    if (one.one_pass and Owned.BACKWARD_PASSES in other.owns) or (other.one_pass and Owned.BACKWARD_PASSES in one.owns):
        return Together.ASIDE
    return Together.COMPOSE


def why_not(first: Mechanism, second: Mechanism) -> str | None:
    """One sentence for two that do not compose; None if they do."""
    if together(first, second) is Together.COMPOSE:
        return None
    sentence = _SENTENCES.get(frozenset({first, second}))
    if sentence is not None:
        return sentence
    shared = first.owns & second.owns
    because = next(text for owned, text in _BECAUSE.items() if owned in shared)
    return because.format(first=first.value, second=second.value)


def refuse(wanted: Mechanism, there: Iterable[Mechanism]) -> None:
    """Raise for a mechanism that cannot be put beside those that are there.

    Raises:
        ValueError: with the sentence of the first of them that it cannot.
    """
    for other in there:
        if together(wanted, other) is Together.REFUSED:
            raise ValueError(why_not(wanted, other))


def why_aside(wanted: Mechanism, there: Iterable[Mechanism]) -> str | None:
    """Reason why a mechanism lets steps run the plain way beside those that are there; None if it need not."""
    reasons = (why_not(wanted, other) for other in there if together(wanted, other) is Together.ASIDE)
    return next(reasons, None)
