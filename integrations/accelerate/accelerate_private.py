"""The private names of Accelerate that retime uses, seen in accelerate 1.15; no other file may use one."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.scheduler import AcceleratedScheduler

from retime.foundations.torch_private import read_private, write_private


def prepared_optimizers(accelerator: Accelerator) -> list[AcceleratedOptimizer]:
    """The optimizers that ``accelerator.prepare()`` has wrapped.

    Raises:
        PrivateNameError: it keeps them by another name.
    """
    optimizers: list[AcceleratedOptimizer] = read_private(accelerator, "_optimizers", "TwoStreams")
    return optimizers


def prepared_schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """The schedulers that ``accelerator.prepare()`` has wrapped.

    Raises:
        PrivateNameError: it keeps them by another name.
    """
    schedulers: list[AcceleratedScheduler] = read_private(accelerator, "_schedulers", "OutOfOrderPipeline")
    return schedulers


def renew_captured_steps(optimizer: AcceleratedOptimizer) -> None:
    """Let a prepared optimizer call the step that its optimizer has now.

    With a scaler, AcceleratedOptimizer holds the step methods that it found when it was made.

    Raises:
        PrivateNameError: it holds them by other names.
    """
    if optimizer.scaler is not None:
        step, feature = optimizer.optimizer.step, "fusion under Accelerate with a gradient scaler"
        write_private(optimizer, "_optimizer_original_step_method", step, feature)
        write_private(optimizer, "_optimizer_patched_step_method", patch_optimizer_step(optimizer, step), feature)
