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
