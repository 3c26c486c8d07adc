"""The mechanisms for ``transformers.Trainer`` and classes that inherit from it: objects that a trainer is given.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    fused = FusedOptimizer(trainer, mode="forward")
    trainer.train()
    print(fused.report())

An object is put on when a training begins, as a ``TrainerCallback`` hears of that, and taken off when ``train()`` ends,
also by an error. What works is the object for Accelerate of the same name: the Trainer's loop is a loop of Accelerate.
"""

try:
    import accelerate  # noqa: F401  the files below need both; this says how to get them
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"retime.integrations.transformers needs {error.name}, which is not installed: "
        "pip install 'lightning-retime[transformers]'",
        name=error.name,
    ) from error

from retime.integrations.transformers.data_parallel import CPUAccumulate, OutOfOrderDataParallel, OutOfOrderPipeline
from retime.integrations.transformers.fused_optimizer import FusedOptimizer
from retime.integrations.transformers.memory_budget import MemoryBudget

__all__ = ["CPUAccumulate", "FusedOptimizer", "MemoryBudget", "OutOfOrderDataParallel", "OutOfOrderPipeline"]
