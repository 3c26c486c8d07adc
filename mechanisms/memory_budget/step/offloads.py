"""The one :class:`OffloadSavedTensors` of each plan that is in use, and what they all moved."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.offload import OffloadReport, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory_budget.planning import PlanChoice
from retime.schedules.budget import OffloadPlan

__all__ = ["Offloads"]


class Offloads:
    """Plans' storages go to ``host``."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._of: dict[OffloadPlan, OffloadSavedTensors] = {}
        self._gone: OffloadReport | None = None

    @contextmanager
    def around(
        self, choice: PlanChoice, keep: Iterable[Tensor], on_mismatch: Callable[[PlanMismatch], None]
    ) -> Iterator[None]:
        """Around a forward pass under a plan that offloads something; arguments as for :class:`OffloadSavedTensors`."""
        offload = self._of.get(choice.plan)
        if offload is None:
            offload = self._of[choice.plan] = OffloadSavedTensors(
                choice.plan, self._host, in_flight_bytes=choice.in_flight_bytes, on_mismatch=on_mismatch
            )
        offload.keep, offload.in_flight_bytes = keep, choice.in_flight_bytes
        try:
            with offload:
                yield
        finally:
            offload.keep = ()  # the batch may go when the step has ended

    def sizes(self, plan: OffloadPlan) -> list[int]:
        """Bytes of each storage that the last forward pass under a plan saved, by number."""
        return self._of[plan].sizes if plan in self._of else []

    def forget(self, plan: OffloadPlan) -> None:
        """A plan is used no more; what it moved still counts."""
        offload = self._of.pop(plan, None)
        if offload is not None:
            self._gone = OffloadReport.total([offload.report(), *filter(None, [self._gone])])

    def keep_only(self, plans: Container[OffloadPlan]) -> None:
        """Forget all other plans, but not before their last backward pass has ended: then at a later call."""
        for plan in [plan for plan, offload in self._of.items() if plan not in plans and offload.ended]:
            self.forget(plan)

    def forget_all(self) -> None:
        """No plan is used any more."""
        for plan in list(self._of):
            self.forget(plan)

    def __len__(self) -> int:
        return len(self._of)

    def report(self) -> OffloadReport | None:
        """What was moved under all plans; None if nothing was to be."""
        return OffloadReport.total([*(offload.report() for offload in self._of.values()), *filter(None, [self._gone])])
