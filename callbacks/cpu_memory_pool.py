"""A pool for the CPU tensors of a training process, as a callback and as a context manager."""

from __future__ import annotations

import math
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from retime.foundations.arguments import AtLeast, Below, checked
from retime.foundations.cpu_pool import MemoryPool, PoolReport
from retime.foundations.messages import warn_no_effect


class CPUMemoryPool(Callback):
    """CPU tensors come from a pool that keeps freed memory for the next ones, in huge pages (moDNN, section 3.3)::

        trainer = Trainer(accelerator="cpu", callbacks=[CPUMemoryPool()])

        with CPUMemoryPool() as pool:       # a bare loop
            model = Net()
            ...
        print(pool.report())

    A C library returns large freed blocks to the kernel, which clears every page when they are allocated again. Here a
    freed block serves the next tensor of its size, the last freed first; free pieces that are too small are joined,
    2 MiB at a time, without copying or clearing. Values do not change.

    Live tensors and free memory together stay below ``slack`` times the peak of live bytes in this epoch
    and the one before (in a bare loop: since it began). Tensors below 16 KiB come from the C library. Enter
    it before the model is made if possible, as existing tensors are not moved.

    The pool is compiled once, with the system's C++ compiler. Without one, or for devices other than CPUs,
    training runs without it and one :class:`NoEffectWarning` says why. Under a memory budget the budget's limit
    holds. Entered several times, also by a fit inside a ``with``, it ends with the outermost.

    Args:
        slack: limit of live and free memory together over the peak of live memory, 1 or more.

    Raises:
        ValueError: ``slack`` is below 1.
        TypeError: ``slack`` is no number.
    """

    @checked
    def __init__(self, slack: Annotated[float, AtLeast(1), Below(math.inf)] = 1.1) -> None:
        self.slack = slack
        self._pool = MemoryPool()
        self._last = PoolReport(note="it was never in use; give it to a Trainer as a callback, or use it in a `with`")
        self._entered, self._in_trainer = 0, False

    def __getstate__(self) -> dict[str, Any]:
        """A copy is in nobody's use."""
        return vars(self) | {"_entered": 0, "_in_trainer": False}

    def __enter__(self) -> CPUMemoryPool:
        self._install()
        self._entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = max(0, self._entered - 1)
        self._remove_if_unused()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device.type
        if device == "cpu":
            self._install()
            self._in_trainer = True
            if self._pool.installed and stage == "fit":
                rank_zero_info(f"retime: CPU memory pool of at most {self.slack:g} times the peak of live bytes")
        else:
            self._leave_out(f"tensors of {device} devices come from a pool of torch's own; leave CPUMemoryPool out")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pool.installed:
            self._pool.begin_window()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._pool.installed and self._in_trainer and trainer.state.fn == "fit":
            rank_zero_info(f"retime: {self.report().headline}")
        self._in_trainer = False
        self._remove_if_unused()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning does not call teardown after an exception
        self.teardown(trainer, pl_module, "")

    def report(self) -> PoolReport:
        """Bytes since it was installed; after its removal, those of that moment; or that it was never in use."""
        if not self._pool.installed:
            return self._last
        counts = self._pool.counts()
        return PoolReport(counts.reused, counts.moved, counts.mapped, counts.live, counts.free)

    def _install(self) -> None:
        if self._pool.installed:
            return
        if self._pool.install():
            self._last = PoolReport()
            self._pool.reset_peaks()
            self._pool.follow(self.slack)
        else:
            self._leave_out(self._pool.why_not)

    def _leave_out(self, reason: str) -> None:
        if self._last.note != reason:
            warn_no_effect(f"no CPU memory pool: {reason}")
        self._last = PoolReport(note=reason)

    def _remove_if_unused(self) -> None:
        if self._pool.installed and not self._entered and not self._in_trainer:
            self._last = self.report()
            self._pool.remove()
