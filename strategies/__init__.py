"""Lightning strategies; ``import retime`` registers their names."""

from retime.strategies.cpu_accumulate import CPUAccumulateStrategy
from retime.strategies.fused_optimizer import FusedOptimizerDDPStrategy, FusedOptimizerStrategy
from retime.strategies.memory_budget import MemoryBudgetStrategy
from retime.strategies.memory_budget_ddp import MemoryBudgetDDPStrategy
from retime.strategies.ooo_ddp import OOODataParallelStrategy
from retime.strategies.ooo_pipeline import OOOPipelineStrategy

__all__ = [
    "CPUAccumulateStrategy",
    "FusedOptimizerDDPStrategy",
    "FusedOptimizerStrategy",
    "MemoryBudgetDDPStrategy",
    "MemoryBudgetStrategy",
    "OOODataParallelStrategy",
    "OOOPipelineStrategy",
]
