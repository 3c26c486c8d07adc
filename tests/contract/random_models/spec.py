"""A random model and its training, as data: `repr` of a `Spec` is Python that makes it again.

All nodes map [B, T, X] to [B, T, X], so that any of them can be left out. `B` batch, `T` time steps, `X` features.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


class Compact:
    """Prints only what differs from the defaults."""

    def __repr__(self) -> str:
        shown = []
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            default = one.default_factory() if callable(one.default_factory) else one.default
            if value != default:
                shown.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Node(Compact):
    """One layer.

    Attributes:
        kind: a name in `layers.KINDS`.
        of: the nodes it reads, counted back: 1 is the node before; beyond the first node is the stem.
        options: of the kind.
        inner: layers inside of it, one after the other.
        like: the node, counted back, whose module this one uses once more; 0 for a module of its own.
        frozen: its parameters need no gradient.
        unused: its module is there but is not called.
    """

    kind: str
    of: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)
    inner: tuple["Node", ...] = ()
    like: int = 0
    frozen: bool = False
    unused: bool = False


@dataclass(frozen=True, repr=False)
class Training(Compact):
    """How the model is trained.

    Attributes:
        optimizer: a name in `torch.optim`.
        options: of the optimizer.
        groups: parameter groups; parameters go to them in turn.
        left_out: every so many-th parameter is in no group; 0 for none.
        steps: optimizer steps.
        accumulate: batches a step.
        clip: "", "value" or "norm".
        zero: "before" the forward pass, or "after" the step.
        to_none: `zero_grad(set_to_none=)`.
        schedule: a name in `training.SCHEDULES`, or "".
        loss: a name in `losses.LOSSES`.
        between: what happens after which step: (step, a method of `training.Between`).
        reads_gradients: the loop looks at the gradients before it clips.
        autocast: the forward pass runs in bfloat16 where torch wants it to.
        told: who divides the batch is told what the loss divides by, where it is a count.
        logs: more than the loss is logged.
    """

    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    groups: int = 1
    left_out: int = 0
    steps: int = 3
    accumulate: int = 1
    clip: str = ""
    zero: str = "after"
    to_none: bool = True
    schedule: str = ""
    loss: str = "mean"
    between: tuple[tuple[int, str], ...] = ()
    reads_gradients: bool = False
    autocast: bool = False
    told: bool = False
    logs: bool = False


@dataclass(frozen=True, repr=False)
class Spec(Compact):
    """A model, its data and its training."""

    seed: int
    nodes: tuple[Node, ...] = ()
    training: Training = Training()
    batch: int = 4
    time: int = 3
    features: int = 4
    dtype: str = "float32"

    def kinds(self) -> Iterator[str]:
        """Of all nodes, the inner ones too."""
        return (node.kind for node in self.all_nodes())

    def all_nodes(self) -> Iterator[Node]:
        """The inner ones too."""
        return _all(self.nodes)


def _all(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.inner)
