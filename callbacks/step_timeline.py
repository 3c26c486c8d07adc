"""Where one training step's time goes: logged, and drawn as a PNG, a page for a browser and a Chrome trace."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean

from lightning.pytorch import LightningModule, Trainer

from retime.callbacks.support.phases import MeasuredSteps, PhaseCallback, check_can_draw, folder_of, write_timeline
from retime.foundations.arguments import checked
from retime.foundations.measure import PHASES, StepTimer, StepTiming


class StepTimeline(PhaseCallback[StepTimer]):
    """Times forward, backward, update and exposed communication of chosen steps, under any strategy.

        trainer = Trainer(strategy="ddp", callbacks=[StepTimeline(every_n_steps=100)])

    Logged for each measured step, in milliseconds: ``timeline/forward_ms`` (``training_step``),
    ``timeline/backward_ms`` (the strategy's ``backward`` with its hooks, exposed communication included),
    ``timeline/update_ms`` (the strategy's ``optimizer_step`` outside its closure: clipping, hooks, update),
    ``timeline/communication_exposed_ms`` and ``timeline/step_ms`` (the batch from its start hook to its end hook; what
    the three phases leave of it is gradients being zeroed, hooks and schedulers). With accumulation a step has a
    forward and a backward a batch, an update after the last, and none of the loading between. With manual optimization
    a step is one batch, with a span for every ``manual_backward`` and optimizer step; ``training_step`` outside them is
    forward.

    A fused optimizer updates inside the backward or the next forward; ``update_ms`` is then what is left outside. Under
    ``ooo_ddp`` gradients that have not arrived by then are waited for in the next forward, and are part of it.

    Communication is exposed from the moment autograd hands the last gradient to a parameter of this process to the end
    of its backward: the collectives that the computation did not hide. It is 0 for one process and left out where no
    parameter receives a gradient (FSDP keeps them from its parameters). Work done after the last gradient, such as
    ``on_after_backward``, a fused update or a deferred weight gradient, is inside it.

    On CUDA the phases are timed by events on the current stream, which are read after the step: no phase waits for the
    device. Every process measures; rank zero logs and draws.

    Args:
        every_n_steps: measure each n-th optimizer step after the warm-up; ``None`` measures one step a ``fit``.
        dirpath: folder for the files; the default is ``timeline`` in the trainer's ``log_dir``.
        log: send the numbers to the trainer's loggers, at every measured step whatever ``log_every_n_steps`` is.
        png: draw ``epoch-<epoch>-step-<step>.png``; takes some tenths of a second after the step, needs matplotlib.
        trace: write ``epoch-<epoch>-step-<step>.json``, a Chrome trace for https://ui.perfetto.dev.
        warm_up: steps at the start of each ``fit`` that are not measured: they compile, allocate and build buckets.
        page: write ``epoch-<epoch>-step-<step>.html``, a page with the step to zoom into, which needs no other file.

    Attributes:
        timings: one :class:`~retime.foundations.measure.timing.StepTiming` a measured step.
        files: the pictures, traces and pages written by this process.

    Raises:
        ValueError: when ``every_n_steps`` is below 1 or ``warm_up`` below 0.
        TypeError: when one of them is not an integer.
        ModuleNotFoundError: when ``png=True`` and matplotlib is not installed.
        OSError: at the start of ``fit``, when nothing can be written into the folder.
    """

    @checked
    def __init__(
        self,
        every_n_steps: int | None = 100,
        dirpath: str | os.PathLike[str] | None = None,
        log: bool = True,
        png: bool = True,
        trace: bool = True,
        warm_up: int = 5,
        page: bool = True,
    ) -> None:
        super().__init__(every_n_steps, warm_up, log)
        if png:
            check_can_draw(self)
        self.dirpath = dirpath
        self.png = png
        self.trace, self.page = trace, page
        self.timings: list[StepTiming] = []
        self.files: list[Path] = []
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and (self.png or self.trace or self.page):
            self._folder = folder_of(trainer, self.dirpath, "timeline")
            self._check_writable(trainer, self._folder)

    def report(self) -> MeasuredSteps:
        """Measurements: ``steps``, ``clock``, ``files``, and the mean of each number over all measured steps."""
        steps = [timing.metrics() for timing in self.timings]
        names = dict.fromkeys(name for step in steps for name in step)
        numbers = {
            "steps": len(steps),
            "clock": self.timings[-1].clock if self.timings else None,
            "files": [str(path) for path in self.files],
            **{f"mean_{name}": fmean(step[name] for step in steps if name in step) for name in names},
        }
        return MeasuredSteps(self, numbers)

    def _begin_step(self, trainer: Trainer, pl_module: LightningModule) -> StepTimer:
        parameters = pl_module.parameters() if trainer.world_size > 1 else None
        return StepTimer(trainer.strategy.root_device, parameters=parameters)

    def _end_step(self, trainer: Trainer, global_step: int, observer: StepTimer) -> None:
        timing = observer.timing()
        self.timings.append(timing)
        self._publish(trainer, {f"timeline/{name}": value for name, value in timing.metrics().items()})
        if trainer.is_global_zero:
            parts = (f"{phase} {timing.metrics()[f'{phase}_ms']:.2f}" for phase in PHASES)
            title = f"optimizer step {global_step}: {timing.step_ms:.2f} ms ({', '.join(parts)}; {timing.clock})"
            stem = self._folder / f"epoch-{trainer.current_epoch}-step-{global_step}"
            self.files += write_timeline(stem, timing.spans, title, png=self.png, trace=self.trace, page=self.page)
