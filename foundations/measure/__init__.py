"""What measures training: times of steps and of layers, their spread, bytes of memory."""

from retime.foundations.measure.memory import (
    MemoryProbe,
    MemorySampler,
    PeakWatch,
    forget_peak,
    peak_so_far,
    status_bytes,
)
from retime.foundations.measure.timing import (
    OTHER,
    PHASES,
    Clock,
    LayerTimes,
    Spread,
    StepTimer,
    StepTiming,
    layer_times,
    speedup,
    spread,
    update_ms,
)

__all__ = [
    "Clock",
    "LayerTimes",
    "MemoryProbe",
    "MemorySampler",
    "OTHER",
    "PHASES",
    "PeakWatch",
    "Spread",
    "StepTimer",
    "StepTiming",
    "forget_peak",
    "layer_times",
    "peak_so_far",
    "speedup",
    "spread",
    "status_bytes",
    "update_ms",
]
