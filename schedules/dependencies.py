"""Which task needs which: the rules of one training step of n layers in a chain.

A schedule may leave a whole kind out of a step: a plan for the backward pass lists no F and takes the forward pass as
done. What a listed task needs from a kind that *is* listed must be there, so that forgetting one O is an error. Layers
without parameters have no W, S and U.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from retime.schedules.tasks import Kind, Task

_LAYERED = (Kind.F, Kind.O, Kind.W)


def dependencies(tasks: Iterable[Task]) -> dict[Task, tuple[Task, ...]]:
    """Return what each task needs to have finished before it starts.

    With n the highest layer listed, and per step and micro-batch:

    - ``F_i`` needs ``F_{i-1}``, and the previous step's last word on the layer: ``U_i``, else ``S_i``, else ``W_i``
      (Oh et al. 2022, section 2, constraints on ``T(F_i)``).
    - ``O_i`` and ``W_i`` need ``O_{i+1}``, those of layer n need ``F_n`` (same place, constraints on ``T(δO_i)`` and
      ``T(δW_i)``).
    - ``S_i`` needs ``W_i``; a task without micro-batch needs all micro-batches.
    - ``U_i`` needs ``W_i``, ``S_i`` and the layer's uses of the old parameters, ``F_i`` and ``O_i``: updating before
      ``O_i`` would differentiate with the new values (Jiang et al. 2020, appendix B.2).
    - ``D_t`` needs ``F_t``, ``P_t`` needs ``D_t``. ``O_{t+1}`` and ``W_{t+1}`` read tensor t, the output of layer t, so
      they need ``P_t`` (Chen et al. 2019, section 3.2); for the last layer's output that is ``O_n`` and ``W_n``.

    Args:
        tasks: one or several steps, in any order.

    Returns:
        One entry a task. A need that is not among ``tasks`` is one that the validator reports as missing.
    """
    tasks = list(tasks)
    rules = _Rules(tasks)
    return {task: tuple(dict.fromkeys(rules.needs(task))) for task in tasks}


class _Rules:
    def __init__(self, tasks: list[Task]) -> None:
        self._at: dict[tuple[Kind, int, int], list[Task]] = defaultdict(list)
        self._kinds: set[tuple[Kind, int]] = set()
        layers = [task.layer for task in tasks if task.kind in _LAYERED]
        self._first_layer, self._last_layer = min(layers, default=1), max(layers, default=1)
        for task in tasks:
            self._at[task.kind, task.layer, task.step].append(task)
            self._kinds.add((task.kind, task.step))

    def needs(self, task: Task) -> list[Task]:
        match task.kind:
            case Kind.F:
                return self._forward(task)
            case Kind.O | Kind.W:
                return self._backward(task)
            case Kind.S:
                return self._required(task, Kind.W, task.layer)
            case Kind.U:
                return [
                    *self._required(task, Kind.W, task.layer),
                    *self._required(task, Kind.S, task.layer),
                    *self._listed(task, Kind.O, task.layer),
                    *self._listed(task, Kind.F, task.layer),
                ]
            case Kind.D:
                return self._required(task, Kind.F, task.layer) if task.layer >= self._first_layer else []
            case Kind.P:
                return self._listed(task, Kind.D, task.layer)

    def _forward(self, task: Task) -> list[Task]:
        needs = self._required(task, Kind.F, task.layer - 1) if task.layer > self._first_layer else []
        for kind in (Kind.U, Kind.S, Kind.W):
            # The parameters are one for all micro-batches, so this need crosses them.
            last_word = self._at.get((kind, task.layer, task.step - 1), [])
            if last_word:
                return needs + last_word
        return needs

    def _backward(self, task: Task) -> list[Task]:
        is_last = task.layer == self._last_layer
        needs = [] if is_last else self._required(task, Kind.O, task.layer + 1)
        if not needs:  # the top layer, or a plan without O: the gradient comes straight from the loss
            needs = self._required(task, Kind.F, self._last_layer)
        for tensor in (task.layer - 1, task.layer) if is_last else (task.layer - 1,):
            prefetches = self._listed(task, Kind.P, tensor)
            if not prefetches and self._listed(task, Kind.D, tensor):
                prefetches = [Task(Kind.P, tensor, task.micro_batch, task.step)]  # offloaded and never brought back
            needs += prefetches
        return needs

    def _listed(self, task: Task, kind: Kind, layer: int) -> list[Task]:
        """The listed tasks of ``kind`` that share the step and, where both have one, the micro-batch."""
        return [
            other
            for other in self._at.get((kind, layer, task.step), [])
            if task.micro_batch is None or other.micro_batch in (None, task.micro_batch)
        ]

    def _required(self, task: Task, kind: Kind, layer: int) -> list[Task]:
        """Return what :meth:`_listed` does, but a step that lists the kind at all must list this one."""
        listed = self._listed(task, kind, layer)
        if listed or (kind, task.step) not in self._kinds:
            return listed
        return [Task(kind, layer, task.micro_batch, task.step)]
