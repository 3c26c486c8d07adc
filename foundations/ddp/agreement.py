"""What each rank decides by itself and all must know: one small message, and one error for all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from retime.foundations.ddp.comm_hook import close_group, own_group
from retime.schedules.budget import BudgetError

__all__ = ["RankAgreement"]

T = TypeVar("T")


class RankAgreement:
    """Small collectives that all ranks call the same number of times.

    Args:
        timeout: how long the others may take, a rank that plans included; None is torch's default.
        group: whose ranks agree, in this group, which stays its owner's; None: all ranks, on the CPU.
    """

    def __init__(self, timeout: timedelta | None = None, *, group: Any = None) -> None:
        gloo = dist.get_backend(group) == "gloo"
        self._own = None if gloo or group is not None else own_group(backend="gloo", timeout=timeout)
        self._group = self._own if group is None else group
        self._on_device = group is not None and not gloo

    def close(self) -> None:
        """Give back what was made for this; the ranks agree on nothing more."""
        own, self._own, self._group = self._own, None, None
        close_group(own)

    def largest(self, decide: Callable[[], float], doing: str) -> float:
        """The largest of the ranks' decisions, of which all get the same number.

        Args:
            decide: this rank's own; whole numbers up to 2**53 come back as they are.
            doing: what that is, for the other ranks' error: ``"plan its batch"``.

        Raises:
            Exception: what ``decide`` raised on this rank.
            BudgetError: another rank refused its budget.
            RuntimeError: ``decide`` failed otherwise on another rank.
        """
        failure: Exception | None = None
        decided = 0.0
        try:
            decided = float(decide())
        except Exception as error:  # the others wait for this rank
            failure = error
        device = torch.cuda.current_device() if self._on_device else "cpu"
        told = torch.tensor([decided, failure is not None], dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        if told[1]:
            self._raise(failure, doing)
        return float(told[0])

    def each_makes(self, make: Callable[[], T], undo: Callable[[T], Any], doing: str) -> T:
        """What ``make`` made on this rank; undone if it failed on another, and this is closed if it failed on any.

        Raises:
            Exception: as :meth:`largest`.
        """
        made: list[T] = []

        def note() -> int:
            made.append(make())
            return 0

        try:
            self.largest(note, doing)
        except Exception:
            for one in made:
                undo(one)
            self.close()
            raise
        return made[0]

    def _raise(self, failure: Exception | None, doing: str) -> None:
        failures: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, None if failure is None else _told(failure), group=self._group)
        if failure is not None:
            raise failure
        rank, told = next((rank, told) for rank, told in enumerate(failures) if told is not None)
        if "floor_bytes" in told:
            raise BudgetError(f"rank {rank} refuses its budget", **told)
        raise RuntimeError(f"rank {rank} could not {doing}, see that rank's error: {told['error']}")


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, BudgetError):
        return {name: getattr(error, name) for name in ("floor_bytes", "task", "layer", "hint")}
    return {"error": f"{type(error).__name__}: {error}"}
