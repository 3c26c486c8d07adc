"""retime re-orders one training step and leaves its result unchanged.

Importing it registers its strategy names with Lightning: ``Trainer(strategy="fused_optimizer")``.
"""

from importlib.metadata import version

from retime import strategies
from retime.callbacks import (
    CPUMemoryPool,
    FuseOptimizer,
    MemoryTimeline,
    ParallelScanBackward,
    PeakMemory,
    PipelineTimeline,
    ReverseFirstK,
    StepTimeline,
)
from retime.foundations.lazy_updates import declare_per_parameter
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.fusion import fuse_optimizer
from retime.modules import ScanGRU, ScanLSTM, ScanRNN, ScanSequential, convert, convert_back
from retime.strategies import *  # noqa: F403  # a strategy's name stands there once

__all__ = [
    "CPUMemoryPool",
    "DifferenceWarning",
    "FuseOptimizer",
    "MemoryTimeline",
    "NoEffectWarning",
    "ParallelScanBackward",
    "PeakMemory",
    "PipelineTimeline",
    "ReverseFirstK",
    "ScanGRU",
    "ScanLSTM",
    "ScanRNN",
    "ScanSequential",
    "StepTimeline",
    "convert",
    "convert_back",
    "declare_per_parameter",
    "fuse_optimizer",
]
__all__ += strategies.__all__
__version__ = version("lightning-retime")
