"""A pool for the CPU tensors of a training process, as a callback and as a context manager."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retime.foundations.arguments import AtLeast, Below, checked
from retime.foundations.cpu_pool import MemoryPool, PoolReport
from retime.foundations.messages import warn_no_effect

__all__ = ["CPUMemoryPool"]


class CPUMemoryPool(Callback):
    """CPU tensors come from a pool that keeps freed memory for the next ones, in huge pages (moDNN, section 3.3)::

        trainer = Trainer(accelerator="cpu", callbacks=[CPUMemoryPool()])

        with CPUMemoryPool() as pool:       # a bare loop
            model = Net()
            ...
        print(pool.report())

    A C library gives large blocks back when they are freed, and the kernel clears every page again when they come
    back. Here a block that is freed waits for the next tensor of its size, the last freed first; free memory in pieces
    that are too small is moved together, 2 MiB at a time, and neither copied nor cleared. Values do not change.

    What live tensors and free memory take together stays below ``slack`` times the most that was alive in this epoch
    and the one before (in a bare loop: since it began). Tensors below 16 KiB come from the C library. Install
    it before the model is made where that is possible: tensors that are there already stay where they are.

    The pool is compiled once, with the system's C++ compiler. Where it cannot be, or for devices other than CPUs,
    training runs without it and a :class:`NoEffectWarning` says why, once. Under a memory budget the budget's limit
    holds. Entered several times, also by a fit inside of a ``with``, it ends with the outermost.

    Args:
        slack: of the limit on live and free memory together, 1 or more.

    Raises:
        ValueError: ``slack`` is below 1.
        TypeError: it is no number.
    """

    @checked
    def __init__(self, slack: Annotated[float, AtLeast(1), Below(math.inf)] = 1.1) -> None:
        self.slack = slack
        self._pool = MemoryPool()
        self._last = PoolReport(note="it was never in use: give it to a Trainer as a callback, or enter it by 'with'")
        self._entered, self._in_trainer = 0, False

    def __getstate__(self) -> dict[str, Any]:
        """A copy is in nobody's use."""
        return vars(self) | {"_entered": 0, "_in_trainer": False}

    def __enter__(self) -> CPUMemoryPool:
        self._install()
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = max(0, self._entered - 1)
        self._remove_if_unused()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device.type
        if device == "cpu":
            self._install()
            self._in_trainer = True
        else:
            self._leave_out(f"tensors of {device} devices come from a pool of torch's own; leave CPUMemoryPool out")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pool.installed:
            self._pool.begin_window()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._in_trainer = False
        self._remove_if_unused()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning does not call teardown after an exception
        self.teardown(trainer, pl_module, "")

    def report(self) -> PoolReport:
        """Bytes since it was installed; after it was removed, those of that moment; or that it was never in use."""
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
