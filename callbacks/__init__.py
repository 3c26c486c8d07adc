"""Lightning callbacks."""

from retime.callbacks.cpu_memory_pool import CPUMemoryPool
from retime.callbacks.fuse_optimizer import FuseOptimizer
from retime.callbacks.memory_timeline import MemoryTimeline
from retime.callbacks.parallel_scan_backward import ParallelScanBackward
from retime.callbacks.peak_memory import PeakMemory
from retime.callbacks.pipeline_timeline import PipelineTimeline
from retime.callbacks.reverse_first_k import ReverseFirstK
from retime.callbacks.step_timeline import StepTimeline

__all__ = [
    "CPUMemoryPool",
    "FuseOptimizer",
    "MemoryTimeline",
    "ParallelScanBackward",
    "PeakMemory",
    "PipelineTimeline",
    "ReverseFirstK",
    "StepTimeline",
]
