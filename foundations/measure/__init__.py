"""What measures training: step times, bytes of memory, energy."""

from retime.foundations.measure.energy_meter import NoMeterError, Watch, find_meter
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
    "NoMeterError",
    "OTHER",
    "PHASES",
    "PeakWatch",
    "StepTimer",
    "StepTiming",
    "Watch",
    "clock_of",
    "find_meter",
    "forget_peak",
    "peak_so_far",
    "status_bytes",
]
