"""Which parts of moDNN's scheduling are on."""

from __future__ import annotations

from dataclasses import dataclass

from retime.schedules.errors import ScheduleError


@dataclass(frozen=True)
class Techniques:
    """Which parts of the scheduling are on.

    Args:
        algorithms: ``"gain"`` chooses by Eq. 10; ``"fastest"`` takes the fastest for which memory can be had, as vDNN
            does; ``"baseline"`` always takes the first.
        prefetch_backlog: whether a prefetch starts, too, when a task further on would be late because the copies before
            its own take long: between layers with much data and little arithmetic, Eq. 9, which looks at one task,
            starts them one by one and late. ``False`` is the paper's rule.
        spare_unused: whether a block that no task has used since it was made stays whatever happens, as in the paper.
            Off, such blocks leave before a defragmentation would move everything: a mask that the forward pass writes
            for the backward pass alone would otherwise lie there all the time.

    Raises:
        ScheduleError: unknown ``algorithms``.
    """

    algorithms: str = "gain"
    prefetch_backlog: bool = True
    spare_unused: bool = False

    def __post_init__(self) -> None:
        if self.algorithms not in ("gain", "fastest", "baseline"):
            raise ScheduleError(f"algorithms={self.algorithms!r} must be 'gain', 'fastest' or 'baseline'")

    @classmethod
    def paper(cls) -> Techniques:
        """Algorithm 1 by the paper's rules alone; copies already queued still count in Eq. 9, see :func:`is_due`."""
        return cls(prefetch_backlog=False, spare_unused=True)
