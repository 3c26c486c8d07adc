"""Where the updates go: after the backward pass, into it, or into the next forward pass.

The three schedules of Jiang et al. 2020, "Optimizer fusion", section 3 and Figure 1 (b) to (d). All of them hold the
same tasks. ``O_1``, the gradient of the batch, is left out: training does not need it.
"""

from __future__ import annotations

from retime.schedules.errors import check_count
from retime.schedules.schedule import Kind, Schedule, Task


def baseline(layers: int, *, steps: int = 1) -> Schedule:
    """Forward, backward, then all updates (Figure 1 b).

    >>> str(baseline(3))
    'F1 F2 F3 O3 W3 O2 W2 W1 U1 U2 U3'

    Args:
        layers: n, at least 1.
        steps: training steps, at least 1.

    Raises:
        ValueError: when ``layers`` or ``steps`` is below 1.
    """
    check_count(layers=layers, steps=steps)
    tasks: list[Task] = []
    for step in range(steps):
        tasks += [*_forward(layers, step), *_backward(layers, step), *_updates(layers, step)]
    return Schedule.sequence(tasks)


def backward_fusion(layers: int, *, steps: int = 1) -> Schedule:
    """Each update as soon as its gradient exists and the old parameters are no longer read (Figure 1 d, algorithm 3).

    ``U_i`` stands behind ``O_i`` as well as ``W_i``: ``O_i`` still reads the old parameters (appendix B.2).

    >>> str(backward_fusion(3))
    'F1 F2 F3 O3 W3 U3 O2 W2 U2 W1 U1'

    Args:
        layers: n, at least 1.
        steps: training steps, at least 1.

    Raises:
        ValueError: when ``layers`` or ``steps`` is below 1.
    """
    check_count(layers=layers, steps=steps)
    tasks: list[Task] = []
    for step in range(steps):
        tasks += [*_forward(layers, step), *_backward(layers, step, with_updates=True)]
    return Schedule.sequence(tasks)


def forward_fusion(layers: int, *, steps: int = 2) -> Schedule:
    """Each update as late as possible, just before the next step's forward of its layer (Figure 1 c, algorithm 2).

    The updates of the last step have no next forward pass and come at the end, as a mechanism has to flush them before
    parameters are read. So it takes two steps to show the fusion; one alone is the baseline.

    >>> str(forward_fusion(2))
    "F1 F2 O2 W2 W1 U1 F1' U2 F2' O2' W2' W1' U1' U2'"

    Args:
        layers: n, at least 1.
        steps: training steps, at least 1.

    Raises:
        ValueError: when ``layers`` or ``steps`` is below 1.
    """
    check_count(layers=layers, steps=steps)
    tasks: list[Task] = []
    for step in range(steps):
        for forward in _forward(layers, step):
            tasks += [Task(Kind.U, forward.layer, step=step - 1), forward] if step else [forward]
        tasks += _backward(layers, step)
    return Schedule.sequence(tasks + _updates(layers, steps - 1))


def _forward(layers: int, step: int) -> list[Task]:
    return [Task(Kind.F, layer, step=step) for layer in range(1, layers + 1)]


def _backward(layers: int, step: int, *, with_updates: bool = False) -> list[Task]:
    kinds = [(layer, [Kind.O] * (layer > 1) + [Kind.W] + [Kind.U] * with_updates) for layer in range(layers, 0, -1)]
    return [Task(kind, layer, step=step) for layer, of_layer in kinds for kind in of_layer]


def _updates(layers: int, step: int) -> list[Task]:
    return [Task(Kind.U, layer, step=step) for layer in range(1, layers + 1)]
