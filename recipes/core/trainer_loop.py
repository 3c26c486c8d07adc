"""One short training run inside a Lightning Trainer, timed step by step: what the Trainer recipes compare."""

import contextlib
import hashlib
import logging
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from retime.callbacks import StepTimeline
from retime.recipes.core.build import build_optimizer, loss_of
from retime.recipes.core.measure import PhaseClock

Batch = tuple[Tensor, Tensor]


@dataclass
class Training:
    """Record of one `fit`: times between steps in ms, the losses, a digest of the final weights."""

    step_ms: list[float]
    losses: list[float]
    weights: str
    strategy: str
    peak_gradient_bytes: int = 0
    first_peak_gradient_bytes: int = 0


class Loader:
    """Ready-made batches in a fixed order. (A plain list would mean several loaders to Lightning.)"""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Task(LightningModule):
    """A network, a loss and one optimizer; nothing else that would take time."""

    def __init__(self, model: nn.Module, optimizer: dict[str, Any], flags: dict[str, bool]) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self._flags = flags

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return loss_of(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self._optimizer, self.model.parameters(), self._flags)


class GradientBytes:
    """Watches the gradients that autograd hands to `parameters`; `peak` is the most bytes alive at one time.

    Each gradient's storage is followed by a weak reference from the moment autograd has made it, so a gradient counts
    until its memory is given back, be it in `.grad` or in a mechanism's private list. Counting happens whenever a
    gradient arrives, which is when the sum can grow. Copies that somebody makes of a gradient are not seen.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._arrived)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _arrived(self, gradient: Tensor) -> None:
        storage = gradient.untyped_storage()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class StepClock(Callback):
    """Times from one batch's end to the next one's, and the losses.

    So the part of a step that a schedule moves into the next forward pass is counted too, in the next step.
    """

    def __init__(self, watch: GradientBytes | None = None) -> None:
        self.losses: list[Tensor] = []
        self.first_peak = 0
        self._clock: PhaseClock | None = None
        self._watch = watch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if self._clock is None:
            self._clock = PhaseClock(pl_module.device)
            self._clock.start()
        else:
            self._clock.mark()
        self.losses.append(outputs["loss"].detach())
        if self._watch is not None and len(self.losses) == 1:
            self.first_peak = self._watch.peak
            self._watch.peak = 0  # a mechanism's first step may run the plain way

    def step_ms(self) -> list[float]:
        """All steps but the first; call it once, after training."""
        return self._clock.steps_ms()[0] if self._clock is not None else []


@dataclass(frozen=True)
class Run:
    """Way to train: the parts that differ between variants."""

    strategy: Callable[[], Strategy | str]
    flags: dict[str, bool] = field(default_factory=dict)


def train(
    run: Run,
    model: nn.Module,
    batches: list[Batch],
    optimizer: dict[str, Any],
    *,
    device: str = "cpu",
    devices: int = 1,
    epochs: int = 1,
    count_gradients: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Training:
    """Fit `model` on `batches`, in their order, `epochs` times, with nothing of Lightning's that prints or saves.

    With `count_gradients` the peak bytes of gradients alive are counted, apart for the first step and for later ones;
    that slows the steps, so do not time such a run.
    """
    watch = GradientBytes(model.parameters()) if count_gradients else None
    clock = StepClock(watch)
    task = Task(model, optimizer, run.flags)
    with quiet_lightning():
        trainer = Trainer(
            strategy=run.strategy(),
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=devices,
            max_epochs=epochs,
            callbacks=[clock, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        torch.manual_seed(0)  # dropout draws the same in every variant, so that results can be compared bit by bit
        trainer.fit(task, Loader(batches))
    if watch is not None:
        watch.remove()
    return Training(
        step_ms=clock.step_ms(),
        losses=[float(loss) for loss in clock.losses],
        weights=digest(model),
        strategy=type(trainer.strategy).__name__,
        peak_gradient_bytes=watch.peak if watch else 0,
        first_peak_gradient_bytes=clock.first_peak,
    )


def step_phases(fit: Callable[[Callback], object], warm_up: int) -> dict[str, float]:
    """Milliseconds of phases in steps of a fit with this callback, as `StepTimeline` sees them; medians over steps."""
    timeline = StepTimeline(every_n_steps=1, warm_up=warm_up, log=False, png=False, trace=False, page=False)
    fit(timeline)
    steps = [timing.metrics() for timing in timeline.timings]
    names = {phase: phase.removesuffix("_ms").replace("_", " ") for phase in steps[0] if phase != "step_ms"}
    return {name: statistics.median(step[phase] for step in steps) for phase, name in names.items()}


def digest(model: nn.Module) -> str:
    """A checksum of all weights and buffers: equal only if they are bit-identical."""
    whole = hashlib.sha256()
    for name, value in model.state_dict().items():
        whole.update(name.encode())
        whole.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning tells on every start which devices it found, and warns about what a timing run means to do."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning 2.6 asks torch 2.13 in a way that is going to be deprecated; a user can do nothing about it.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
