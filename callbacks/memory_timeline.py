"""Bytes over one training step: predicted by a dry run, and measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from retime.callbacks.support.phases import MeasuredSteps, PhaseCallback, check_can_draw, folder_of
from retime.foundations.arguments import checked
from retime.foundations.measure import MemorySampler
from retime.foundations.messages import show_bytes
from retime.foundations.parts import dry_part, samples_in, split_batch
from retime.foundations.preserve_state import preserve_state
from retime.mechanisms.memory_budget import StepProfile, TrainingStep, buckets_of, reduction_bytes, replay
from retime.schedules.budget import OffloadPlan
from retime.strategies.support.budgeted_steps import Budgeted, gradients_in, muted_logging


@dataclass(frozen=True)
class StepBytes:
    """One measured step.

    Attributes:
        step: the trainer's ``global_step`` before it.
        plan: what it ran under; empty without a memory budget.
        predicted: phase of each operation, and bytes that tensors hold during it; empty where no dry run is possible.
        measured: milliseconds since the batch began, and bytes.
        phases: milliseconds at which each phase began, and its name.
        note: why nothing was predicted.
    """

    step: int
    plan: str
    predicted: tuple[tuple[str, int], ...]
    measured: tuple[tuple[float, int], ...]
    phases: tuple[tuple[float, str], ...]
    note: str = ""

    def metrics(self) -> dict[str, int]:
        """``measured_peak_bytes``, and ``predicted_peak_bytes`` if there is one."""
        peaks = {"measured_peak_bytes": max(nbytes for _, nbytes in self.measured)}
        if self.predicted:
            peaks["predicted_peak_bytes"] = max(nbytes for _, nbytes in self.predicted)
        return peaks


class MemoryTimeline(PhaseCallback[MemorySampler]):
    """Predicted against measured bytes over a step, under strategies for one device and DDP (of rank 0).

        trainer = Trainer(strategy="memory_budget", callbacks=[MemoryTimeline(every_n_steps=100)])

    Predicted bytes are those of a dry run of the step, under the plan of a memory budget if there is one.
    Measured bytes are, on CUDA, the allocator's; elsewhere the process's resident size, shifted to begin at the
    prediction's first value. They are sampled each millisecond and at each change of phase, so a short peak may be
    missed; :class:`PeakMemory` asks the kernel for the peak. With accumulation the last batch of a step counts.
    Logged: ``memory/predicted_peak_bytes`` and ``memory/measured_peak_bytes``.

    The dry run calls ``training_step`` once more after the measured step, on tensors without values; its changes to
    the module are undone, and nothing is logged.

    Args:
        every_n_steps: measure each n-th optimizer step after the warm-up; ``None`` measures one step a ``fit``.
        dirpath: folder for the pictures; the default is ``memory_timeline`` in the trainer's ``log_dir``.
        png: draw ``epoch-<epoch>-step-<step>.png``; needs matplotlib.
        log: send the numbers to the trainer's loggers.
        warm_up: steps at the start of each ``fit`` that are not measured: a budget is planned for in the first.

    Attributes:
        steps: one :class:`StepBytes` a measured step.
        files: the pictures.

    Raises:
        ValueError: when a number is too small.
        TypeError: when one is not an integer.
        ModuleNotFoundError: when ``png=True`` and matplotlib is not installed.
        OSError: at the start of ``fit``, when nothing can be written into the folder.
    """

    @checked
    def __init__(
        self,
        every_n_steps: int | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        png: bool = True,
        log: bool = True,
        warm_up: int = 1,
    ) -> None:
        super().__init__(every_n_steps, warm_up, log)
        if png:
            check_can_draw(self)
        self.dirpath, self.png = dirpath, png
        self.steps: list[StepBytes] = []
        self.files: list[Path] = []
        self._folder = Path()
        self._batch: tuple[Any, int] = (None, 0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.png:
            self._folder = folder_of(trainer, self.dirpath, "memory_timeline")
            self._check_writable(trainer, self._folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._batch = (None, 0) if self._observer is None else (batch, batch_idx)

    def report(self) -> MeasuredSteps:
        """Measurements: ``steps``, ``files`` and the largest of each number over all measured steps."""
        names = dict.fromkeys(name for step in self.steps for name in step.metrics())
        numbers = {
            "steps": len(self.steps),
            "files": [str(path) for path in self.files],
            **{name: max(step.metrics()[name] for step in self.steps if name in step.metrics()) for name in names},
        }
        return MeasuredSteps(self, numbers)

    def _begin_step(self, trainer: Trainer, pl_module: LightningModule) -> MemorySampler:
        return MemorySampler(trainer.strategy.root_device)

    def _abandon(self) -> None:
        super()._abandon()
        self._batch = (None, 0)

    def _end_step(self, trainer: Trainer, global_step: int, observer: MemorySampler) -> None:
        (batch, batch_idx), self._batch = self._batch, (None, 0)
        plan, profile, note = _dry_run(trainer, batch, batch_idx)
        measured = observer.samples
        predicted: tuple[tuple[str, int], ...] = ()
        if profile is not None:
            predicted_bytes = profile.held_bytes()
            phases = [operation.phase.value for operation in profile.trace.operations]
            predicted = tuple(zip(phases, predicted_bytes, strict=True))
        if trainer.strategy.root_device.type != "cuda":
            before = sum(s.nbytes for s in profile.trace.storages if s.born < 0) if profile is not None else 0
            measured = [(at, nbytes - measured[0][1] + before) for at, nbytes in measured]
        step = StepBytes(global_step, plan, predicted, tuple(measured), tuple(observer.phases), note)
        self.steps.append(step)
        self._publish(trainer, {f"memory/{name}": float(value) for name, value in step.metrics().items()})
        if self.png and trainer.is_global_zero:
            path = self._folder / f"epoch-{trainer.current_epoch}-step-{global_step}.png"
            _draw(step, path)
            self.files.append(path)


def _dry_run(trainer: Trainer, batch: Any, batch_idx: int) -> tuple[str, StepProfile | None, str]:
    """The plan that the batch ran under, as text; the dry run under it; why there is none."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if not module.automatic_optimization:
        return "", None, "no dry run: with manual optimization training_step updates, and steps schedules"
    with muted_logging(trainer):
        try:
            budgeted = strategy if isinstance(strategy, Budgeted) else None
            split = split_batch if budgeted is None else budgeted.options.split
            shape = None if budgeted is None else budgeted.planned(batch)
            samples = samples_in(batch, split)
            plan = OffloadPlan(samples) if shape is None else shape.choice.plan
            step = TrainingStep(
                module,
                batch,
                samples,
                loss=lambda part: _output(trainer, part, batch_idx),
                optimizers=trainer.optimizers,
                split=lambda whole, first, last: dry_part(whole, first, last, split),
                gradients=gradients_in(trainer),
                buckets=buckets_of(strategy.model),
                reduction_bytes=reduction_bytes(strategy.model),
            )
            with preserve_state(module, step.loss):
                in_flight = 0 if shape is None else shape.choice.in_flight_bytes
                return "" if shape is None else str(plan), replay(step, plan, in_flight_bytes=in_flight), ""
        except Exception as error:  # whatever the user's code says to tensors without values
            return "", None, f"no dry run: {error}"


def _output(trainer: Trainer, part: Any, batch_idx: int) -> Any:
    training_step = trainer.lightning_module.training_step
    number = (batch_idx,) if is_param_in_hook_signature(training_step, "batch_idx", min_args=2) else ()
    with trainer.precision_plugin.train_step_context():
        return training_step(part, *number)


def _draw(step: StepBytes, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    end_ms = step.measured[-1][0]
    axes.plot([at for at, _ in step.measured], [nbytes / 2**20 for _, nbytes in step.measured], label="measured")
    if step.predicted:
        places = _places(step, end_ms)
        axes.plot(places, [nbytes / 2**20 for _, nbytes in step.predicted], drawstyle="steps-post", label="predicted")
    for at, phase in step.phases:
        if phase != "other":
            axes.axvline(at, color="#888888", linewidth=0.8, linestyle=":")
            axes.annotate(phase, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=8, va="top")
    axes.set_xlabel("time (ms); predicted operations are spread evenly over the step")
    axes.set_ylabel("MiB")
    peaks = ", ".join(f"{name.split('_')[0]} {show_bytes(value)}" for name, value in step.metrics().items())
    axes.set_title(f"optimizer step {step.step}: peak {peaks}" + (f"\n{step.plan}" if step.plan else ""), fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _places(step: StepBytes, end_ms: float) -> list[float]:
    """Place of each predicted operation, as drawn, on the measured time axis; sub-batches share one backward."""
    starts = [at for at, phase in step.phases if phase == "forward"][:1] or [0.0]
    stops = [at for at, phase in step.phases if phase == "other" and at > starts[0]][-1:] or [end_ms]
    count = len(step.predicted)
    return [starts[0] + (stops[0] - starts[0]) * index / max(1, count - 1) for index in range(count)]
