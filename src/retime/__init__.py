"""retime re-orders one training step and leaves its result unchanged.

Importing it registers its strategy names with Lightning: ``Trainer(strategy="fused_optimizer")``.
"""

from importlib.metadata import version

from lightning.pytorch.strategies import StrategyRegistry

from retime.callbacks.cpu_memory_pool import CPUMemoryPool
from retime.callbacks.fuse_optimizer import FuseOptimizer
from retime.callbacks.memory_timeline import MemoryTimeline
from retime.callbacks.parallel_scan_backward import ParallelScanBackward
from retime.callbacks.peak_memory import PeakMemory
from retime.callbacks.pipeline_timeline import PipelineTimeline
from retime.callbacks.reverse_first_k import ReverseFirstK
from retime.callbacks.step_timeline import StepTimeline
from retime.foundations.lazy_updates import declare_per_parameter
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.fusion import fuse_optimizer
from retime.modules.convert import convert, convert_back
from retime.modules.layers import ScanGRU, ScanLSTM, ScanRNN
from retime.modules.scan_sequential import ScanSequential
from retime.strategies.cpu_accumulate import CPUAccumulateStrategy
from retime.strategies.fused_optimizer import FusedOptimizerDDPStrategy, FusedOptimizerStrategy
from retime.strategies.memory_budget import MemoryBudgetStrategy
from retime.strategies.memory_budget_ddp import MemoryBudgetDDPStrategy
from retime.strategies.ooo_ddp import OOODataParallelStrategy
from retime.strategies.ooo_pipeline import OOOPipelineStrategy

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

for _name, _mode, _description in (
    ("fused_optimizer", "backward", "one device, updates inside the backward pass"),
    ("fused_optimizer_forward", "forward", "one device, updates before the next forward pass"),
):
    StrategyRegistry.register(_name, FusedOptimizerStrategy, description=_description, mode=_mode)

for _name, _start in (
    ("fused_optimizer_ddp", "popen"),
    ("fused_optimizer_ddp_spawn", "spawn"),
    ("fused_optimizer_ddp_fork", "fork"),
):
    StrategyRegistry.register(
        _name,
        FusedOptimizerDDPStrategy,
        description=f"DDP, each bucket's update behind its all-reduce, start method {_start}",
        start_method=_start,
    )

for _name, _start in (("ooo_ddp", "popen"), ("ooo_ddp_spawn", "spawn"), ("ooo_ddp_fork", "fork")):
    StrategyRegistry.register(
        _name,
        OOODataParallelStrategy,
        description=f"DDP with out-of-order weight gradients and cross-iteration waits, start method {_start}",
        start_method=_start,
    )

for _name, _start in (
    ("ooo_pipeline", "popen"),
    ("ooo_pipeline_spawn", "spawn"),
    ("ooo_pipeline_fork", "fork"),
):
    StrategyRegistry.register(
        _name,
        OOOPipelineStrategy,
        description=f"pipeline parallel with out-of-order weight gradients, start method {_start}",
        start_method=_start,
    )

for _name, _start in (
    ("cpu_accumulate_ddp", "popen"),
    ("cpu_accumulate_ddp_spawn", "spawn"),
    ("cpu_accumulate_ddp_fork", "fork"),
):
    StrategyRegistry.register(
        _name,
        CPUAccumulateStrategy,
        description=f"DDP whose gradients the host's processors add up in shared memory, start method {_start}",
        start_method=_start,
    )

StrategyRegistry.register(
    "memory_budget", MemoryBudgetStrategy, description="one device, within 90 % of its memory: offload and sub-batches"
)

for _name, _start in (
    ("memory_budget_ddp", "popen"),
    ("memory_budget_ddp_spawn", "spawn"),
    ("memory_budget_ddp_fork", "fork"),
):
    StrategyRegistry.register(
        _name,
        MemoryBudgetDDPStrategy,
        description=f"DDP, each rank within 90 % of its memory: offload and sub-batches, start method {_start}",
        start_method=_start,
    )
