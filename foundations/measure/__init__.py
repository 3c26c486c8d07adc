"""What measures training: step times, bytes of memory."""

from retime.foundations.measure.memory import (
    MemoryProbe,
    MemorySampler,
    PeakWatch,
    forget_peak,
    peak_so_far,
    status_bytes,
)
from retime.foundations.measure.step_timer import OTHER, PHASES, StepTimer, StepTiming, clock_of

__all__ = [
    "MemoryProbe",
    "MemorySampler",
    "OTHER",
    "PHASES",
    "PeakWatch",
    "StepTimer",
    "StepTiming",
    "clock_of",
    "forget_peak",
    "peak_so_far",
    "status_bytes",
]
