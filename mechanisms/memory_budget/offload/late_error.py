"""A copy that failed where no error can be raised."""

from __future__ import annotations

from retime.mechanisms.memory_budget.host import HostError, raise_interruption


class LateError:
    """The first such failure, until it can be raised."""

    def __init__(self) -> None:
        self._error: HostError | None = None

    def note(self, error: HostError) -> None:
        """A copy failed."""
        self._error = self._error or error

    def raise_noted(self) -> None:
        """Raise what was noted, once.

        Raises:
            HostError: a copy failed.
        """
        raise_interruption()
        error, self._error = self._error, None
        if error is not None:
            raise error
