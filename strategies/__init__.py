"""Lightning strategies, and the table of their names; ``import retime`` registers them and shows the classes."""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from retime.strategies.cpu_accumulate import CPUAccumulateStrategy
from retime.strategies.fused_optimizer import FusedOptimizerDDPStrategy, FusedOptimizerStrategy
from retime.strategies.memory_budget import MemoryBudgetStrategy
from retime.strategies.memory_budget_ddp import MemoryBudgetDDPStrategy
from retime.strategies.ooo_ddp import OOODataParallelStrategy
from retime.strategies.ooo_pipeline import OOOPipelineStrategy
from retime.strategies.ooo_single_device import OOOSingleDeviceStrategy

__all__ = [
    "CPUAccumulateStrategy",
    "FusedOptimizerDDPStrategy",
    "FusedOptimizerStrategy",
    "MemoryBudgetDDPStrategy",
    "MemoryBudgetStrategy",
    "OOODataParallelStrategy",
    "OOOPipelineStrategy",
    "OOOSingleDeviceStrategy",
]

STRATEGIES: tuple[tuple[str, type[Strategy], bool, str, dict[str, Any]], ...] = (
    ("fused_optimizer", FusedOptimizerStrategy, False, "updates inside the backward pass", {"mode": "backward"}),
    ("fused_optimizer_forward", FusedOptimizerStrategy, False, "updates in the next forward pass", {"mode": "forward"}),
    ("fused_optimizer_ddp", FusedOptimizerDDPStrategy, True, "DDP, each bucket's update behind its all-reduce", {}),
    ("ooo_ddp", OOODataParallelStrategy, True, "DDP, out-of-order weight gradients and cross-iteration waits", {}),
    ("ooo_pipeline", OOOPipelineStrategy, True, "pipeline parallel with out-of-order weight gradients", {}),
    ("ooo_single_device", OOOSingleDeviceStrategy, False, "weight gradients on a stream beside output gradients", {}),
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
