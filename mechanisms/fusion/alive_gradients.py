"""How many bytes of gradients are alive at one time, as far as the parameters' hooks can see."""

from retime.mechanisms.fusion.followed import Followed
from retime.mechanisms.fusion.report import FusionReport


class AliveGradients:
    """Counts them, and notes the most in the report."""

    def __init__(self, report: FusionReport) -> None:
        self._report = report
        self._bytes = 0

    def note(self, followed: Followed, size: int) -> None:
        """This parameter's gradient now takes ``size`` bytes."""
        self._bytes += size - followed.alive_bytes
        followed.alive_bytes = size
        if self._bytes > self._report.peak_gradient_bytes:
            self._report.peak_gradient_bytes = self._bytes

    def forget(self) -> None:
        """The step has ended, or was abandoned."""
        self._bytes = 0
