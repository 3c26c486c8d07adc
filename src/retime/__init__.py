"""retime re-orders one training step and leaves its result unchanged.

Importing it registers its strategy names with Lightning: ``Trainer(strategy="fused_optimizer")``.
"""

from importlib.metadata import version
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

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
from retime.strategies import (
    CPUAccumulateStrategy,
    FusedOptimizerDDPStrategy,
    FusedOptimizerStrategy,
    MemoryBudgetDDPStrategy,
    MemoryBudgetStrategy,
    OOODataParallelStrategy,
    OOOPipelineStrategy,
)

__all__ = [
    "CPUAccumulateStrategy",
    "CPUMemoryPool",
    "DifferenceWarning",
    "FuseOptimizer",
    "FusedOptimizerDDPStrategy",
    "FusedOptimizerStrategy",
    "MemoryBudgetDDPStrategy",
    "MemoryBudgetStrategy",
    "MemoryTimeline",
    "NoEffectWarning",
    "OOODataParallelStrategy",
    "OOOPipelineStrategy",
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
__version__ = version("lightning-retime")

STRATEGIES: tuple[tuple[str, type[Strategy], bool, str, dict[str, Any]], ...] = (
    ("fused_optimizer", FusedOptimizerStrategy, False, "updates inside the backward pass", {"mode": "backward"}),
    (
        "fused_optimizer_forward",
        FusedOptimizerStrategy,
        False,
        "updates before the next forward pass",
        {"mode": "forward"},
    ),
    ("fused_optimizer_ddp", FusedOptimizerDDPStrategy, True, "DDP, each bucket's update behind its all-reduce", {}),
    ("ooo_ddp", OOODataParallelStrategy, True, "DDP, out-of-order weight gradients and cross-iteration waits", {}),
    ("ooo_pipeline", OOOPipelineStrategy, True, "pipeline parallel with out-of-order weight gradients", {}),
    ("cpu_accumulate_ddp", CPUAccumulateStrategy, True, "DDP, gradients added up in shared memory by processors", {}),
    ("memory_budget", MemoryBudgetStrategy, False, "within 90 % of a device's memory: offload and sub-batches", {}),
    ("memory_budget_ddp", MemoryBudgetDDPStrategy, True, "DDP, each rank within 90 % of its memory", {}),
)
"""Each name: its class, whether it starts processes (then also as ``_spawn`` and ``_fork``), description, arguments."""

for _name, _strategy, _starts, _description, _arguments in STRATEGIES:
    if not _starts:
        StrategyRegistry.register(_name, _strategy, description=f"one device, {_description}", **_arguments)
        continue
    for _suffix, _start in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
        StrategyRegistry.register(
            f"{_name}{_suffix}", _strategy, description=f"{_description}, start method {_start}", start_method=_start
        )
