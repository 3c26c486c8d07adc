"""The mechanisms for Accelerate: objects applied after ``accelerator.prepare()``.

Accelerate has no entry point for plug-ins of others and its Trainer builds the Accelerator itself, so the objects work
on what ``prepare`` returned. They need nothing from a loop, and can be made in a ``TrainerCallback`` too.
"""

try:
    import accelerate  # noqa: F401  the files below need it; this says how to get it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"retime.integrations.accelerate needs {error.name}, which is not installed: "
        "pip install 'lightning-retime[accelerate]'",
        name=error.name,
    ) from error

from retime.integrations.accelerate.cpu_accumulate import CPUAccumulate
from retime.integrations.accelerate.fused_optimizer import FusedOptimizer
from retime.integrations.accelerate.memory_budget import MemoryBudget
from retime.integrations.accelerate.ooo_pipeline import OutOfOrderPipeline
from retime.integrations.accelerate.out_of_order import OutOfOrderDataParallel
from retime.integrations.accelerate.two_streams import TwoStreams

__all__ = [
    "CPUAccumulate",
    "FusedOptimizer",
    "MemoryBudget",
    "OutOfOrderDataParallel",
    "OutOfOrderPipeline",
    "TwoStreams",
]
