"""The most memory each phase of a training step needs."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from retime.callbacks.support.phases import MeasuredSteps, PhaseCallback
from retime.foundations.arguments import checked
from retime.foundations.measure import MemoryProbe


class PeakMemory(PhaseCallback[MemoryProbe]):
    """Peak bytes during forward, backward, update and the whole batch, under any strategy.

        trainer = Trainer(strategy="fused_optimizer", callbacks=[PeakMemory(every_n_steps=50)])

    Logged for each measured step: ``memory/forward_peak_bytes``, ``memory/backward_peak_bytes``,
    ``memory/update_peak_bytes`` and ``memory/batch_peak_bytes`` (from a batch's start hook to its end hook, so at least
    the largest of the three). The phases are those of :class:`~retime.callbacks.step_timeline.StepTimeline`; one that
    did not run is left out, and with accumulation each number is the largest over the step's batches.

    On CUDA it is the allocator's peak of allocated bytes on this process's device. Elsewhere it is the peak resident
    size of this process, libraries included; freed memory that the C library keeps counts as resident. Every process
    measures itself; rank zero logs.

    Measuring a phase resets the peak before it: ``torch.cuda.max_memory_allocated``, or the process's ``VmHWM`` and
    ``ru_maxrss``, read after a ``fit`` with this callback cover the last measured phase on only. Use :attr:`peaks`.

    Args:
        every_n_steps: measure each n-th optimizer step, the first included.
        log: send the numbers to the trainer's loggers, at every measured step whatever ``log_every_n_steps`` is.

    Attributes:
        peaks: one dict a measured step: ``step`` (the trainer's ``global_step`` before it) and, of those above that
            ran, ``forward_peak_bytes``, ``backward_peak_bytes``, ``update_peak_bytes``, ``batch_peak_bytes``.

    Raises:
        ValueError: when ``every_n_steps`` is below 1.
        TypeError: when it is not an integer.
    """

    @checked
    def __init__(self, every_n_steps: int = 1, log: bool = True) -> None:
        super().__init__(every_n_steps, warm_up=0, log=log)
        self.peaks: list[dict[str, int]] = []
        self._source: str | None = None
        self._note = ""

    def report(self) -> MeasuredSteps:
        """Measurements: ``steps``, ``source``, ``note`` and the largest of each number over all measured steps.

        ``source`` is ``"cuda allocator"``, ``"VmHWM"`` (the kernel's peak resident size) or ``"sampled rss"``, which
        may miss a short peak; ``note`` then says why it had to be sampled.
        """
        names = dict.fromkeys(name for step in self.peaks for name in step if name != "step")
        numbers = {
            "steps": len(self.peaks),
            "source": self._source,
            "note": self._note,
            **{name: max(step[name] for step in self.peaks if name in step) for name in names},
        }
        return MeasuredSteps(self, numbers)

    def _begin_step(self, trainer: Trainer, pl_module: LightningModule) -> MemoryProbe:
        probe = MemoryProbe(trainer.strategy.root_device)
        self._source, self._note = probe.source, probe.note
        return probe

    def _end_step(self, trainer: Trainer, global_step: int, observer: MemoryProbe) -> None:
        measured = {f"{phase}_peak_bytes": peak for phase, peak in observer.peaks().items()}
        self.peaks.append({"step": global_step, **measured})
        self._publish(trainer, {f"memory/{name}": float(peak) for name, peak in measured.items()})
