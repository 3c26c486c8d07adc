"""The plans that batches run under, by what they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from retime.foundations.parts import Certificate, name_of
from retime.mechanisms.memory_budget.planning import PlannedShape, plans_in, state_of
from retime.mechanisms.memory_budget.step.batch_record import BatchRecord, Key
from retime.mechanisms.memory_budget.step.graph_paths import GraphPaths
from retime.schedules.budget import OffloadPlan

__all__ = ["MOST_PLANS", "PlanBook"]

MOST_PLANS = 128
"""So many plans are kept, those used last."""


@dataclass
class _Entry:
    shape: PlannedShape
    sizes: tuple[int, ...]
    paths: GraphPaths


class PlanBook:
    """One plan a key, with the sizes it was made for and the graph paths that were seen under it.

    Plans of an earlier run wait by name, until a batch that they were made for comes.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}  # used longest ago first
        self._earlier: dict[str, PlannedShape] = {}
        self._unexamined: set[Key] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, record: BatchRecord) -> PlannedShape | None:
        """The plan that holds for a batch; None if there is none."""
        entry = self._entries.get(record.key)
        return entry.shape if entry is not None and record.fits(entry.shape.samples, entry.sizes) else None

    def paths(self, record: BatchRecord) -> GraphPaths:
        """The graph paths that were seen under the plan of this key; new ones where there is no plan."""
        entry = self._entries.get(record.key)
        return GraphPaths() if entry is None else entry.paths

    def add(self, record: BatchRecord, shape: PlannedShape) -> None:
        """Batches like this one run under this plan from now on; what was known of its key goes."""
        self._entries.pop(record.key, None)
        self._unexamined.discard(record.key)
        constants = shape.certificate is not None and shape.certificate.constants
        self._entries[record.key] = _Entry(shape, record.sizes, GraphPaths(constants))
        while len(self._entries) > MOST_PLANS:
            del self._entries[next(iter(self._entries))]

    def use(self, record: BatchRecord) -> None:
        """The plan of this key is the one used last."""
        self._entries[record.key] = self._entries.pop(record.key)

    def recertify(self, record: BatchRecord, certificate: Certificate) -> PlannedShape:
        """More is known of whether this batch may be split; returns the plan with that."""
        entry = self._entries[record.key]
        entry.shape = replace(entry.shape, certificate=certificate)
        return entry.shape

    def renew(self, record: BatchRecord, before: PlannedShape, now: PlannedShape) -> None:
        """More is known of a plan, if it is still there."""
        entry = self._entries.get(record.key)
        if entry is not None and entry.shape is before:
            entry.shape = now

    def drop(self, plan: OffloadPlan) -> None:
        """It does not hold: nothing runs under it any more, nor takes it up from an earlier run."""
        for key, entry in list(self._entries.items()):
            if entry.shape.choice.plan == plan:
                del self._entries[key]
                if entry.paths.new:
                    self._unexamined.add(key)
        self._earlier = {name: shape for name, shape in self._earlier.items() if shape.choice.plan != plan}

    def shapes(self, but: BatchRecord | None = None) -> list[PlannedShape]:
        """All that is planned, used longest ago first; without the plan of one key."""
        return [entry.shape for key, entry in self._entries.items() if but is None or key != but.key]

    def same_shape(self, record: BatchRecord) -> bool:
        """Whether there is a plan for such batches and another state of the model."""
        return any(key[-1] == record.key[-1] for key in self._entries if key != record.key)

    def unexamined(self) -> bool:
        """Whether a batch took a graph path that no later one was examined for."""
        return bool(self._unexamined) or any(entry.paths.new for entry in self._entries.values())

    def earlier(self, record: BatchRecord) -> PlannedShape | None:
        """An earlier run's plan for a batch like this one."""
        found = self._earlier.get(record.name)
        return None if found is None or record.samples > found.samples else found

    def state(self, made_for: Mapping[str, Any]) -> dict[str, Any]:
        """All plans in plain types, and what they were made for."""
        return state_of(made_for, {name_of(key): entry.shape for key, entry in self._entries.items()})

    def load(self, state: object, made_for: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` gave in an earlier run.

        Raises:
            OtherPlansError: it was made for something else.
            ScheduleError: this is no such state.
        """
        self._earlier = plans_in(state, made_for)
