"""Forward, backward and update of a Lightning step, as told by the strategy, and the callbacks that listen.

The callbacks here must not override ``on_after_backward``, ``on_before_optimizer_step``, ``on_before_zero_grad`` or
``configure_gradient_clipping``: a fused optimizer takes whoever does for a reader of gradients and runs the plain step,
so that the measurement would measure itself. They stand in for three methods of the strategy instead, on the instance
and for the measured batch only.
"""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import Strategy

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.measure import OTHER
from retime.foundations.messages import Report, show_bytes, warn_no_effect
from retime.foundations.patching import layered_methods, replaced_attributes
from retime.schedules.timeline import Span, write_chrome_trace, write_page, write_png
from retime.strategies.support.lightning_private import logged_step


class PhaseObserver(Protocol):
    """Measures the phases of a batch."""

    def start(self) -> None:
        """The batch begins."""

    def switch(self, phase: str) -> None:
        """``phase`` is ``"forward"``, ``"backward"``, ``"update"`` or ``"other"``."""

    def stop(self) -> None:
        """The batch is over, or has failed."""


_Observer = TypeVar("_Observer", bound=PhaseObserver)


class StrategyPhases:
    """Tells an observer of one strategy object's phases: has methods in front of three of its own until :meth:`detach`.

    Phases exclude one another: with manual optimization, a backward inside ``training_step`` interrupts the forward.
    The update is ``optimizer_step`` outside its closure, since Lightning's closure is the forward and the backward.
    """

    def __init__(self, strategy: Strategy, observer: PhaseObserver) -> None:
        self._observer = observer
        self._stack = [OTHER]
        self._told = OTHER
        methods: dict[str, Callable[..., Any]] = {
            "training_step": self._training_step,
            "backward": self._backward,
            "optimizer_step": self._optimizer_step,
        }
        self._plain = {name: getattr(strategy, name) for name in methods}
        self._layers = ExitStack()
        self._layers.enter_context(layered_methods(strategy, **methods))

    def detach(self) -> None:
        """Tell the observer no more."""
        self._layers.close()

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("forward"):
            return self._plain["training_step"](*args, **kwargs)

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("backward"):
            return self._plain["backward"](*args, **kwargs)

    def _optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        step = self._plain["optimizer_step"]
        if closure is do_nothing_closure:  # manual optimization without a closure
            with self._phase("update"):
                return step(optimizer, closure, *args, **kwargs)
        frame = len(self._stack)

        def then_update(run: Callable[..., Any]) -> Callable[..., Any]:
            def ran(*given: Any, **more: Any) -> Any:
                with self._phase(OTHER):  # zeroing the gradients is neither forward nor backward
                    try:
                        return run(*given, **more)
                    finally:
                        self._stack[frame] = "update"

            return ran

        with self._phase(OTHER):  # nothing is updated before the closure has run
            if not isinstance(closure, Closure):
                return step(optimizer, then_update(closure), *args, **kwargs)
            with replaced_attributes(closure, closure=then_update(closure.closure)):  # a fused step takes no other
                return step(optimizer, closure, *args, **kwargs)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self._stack.append(phase)
        self._tell()
        try:
            yield
        finally:
            self._stack.pop()
            self._tell()

    def _tell(self) -> None:
        if self._stack[-1] != self._told:
            self._told = self._stack[-1]
            self._observer.switch(self._told)


def check_can_draw(callback: Callback) -> None:
    """Raise ModuleNotFoundError if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{type(callback).__name__}(png=True) draws with matplotlib, which is not installed: "
            'pip install "lightning-retime[recipes]", or give png=False.'
        )


def folder_of(trainer: Trainer, dirpath: str | os.PathLike[str] | None, name: str) -> Path:
    """Return ``dirpath``, or else the folder ``name`` in the trainer's ``log_dir``; all processes have to ask."""
    return Path(dirpath if dirpath is not None else Path(trainer.log_dir or ".") / name)


def write_timeline(
    stem: Path, spans: Sequence[Span], title: str, *, png: bool, trace: bool, page: bool, **words: str
) -> list[Path]:
    """Write ``spans`` as ``<stem>.png``, ``.json`` and ``.html``, as far as wanted.

    Args:
        words: for :func:`retime.schedules.write_page`.

    Returns:
        The files; a picture or a page of nothing is left out.
    """
    files = []
    if png and spans:
        files.append(stem.with_suffix(".png"))
        write_png(files[-1], spans, title=title)
    if trace:
        files.append(stem.with_suffix(".json"))
        write_chrome_trace(files[-1], spans, process_name=title)
    if page and spans:
        files.append(stem.with_suffix(".html"))
        write_page(files[-1], {"": spans}, title=title, **words)
    return files


class MeasuredSteps(Report, dict[str, Any]):
    """Measurements of a callback, by name: a dict that prints as every report does."""

    def __init__(self, callback: Callback, numbers: dict[str, Any]) -> None:
        super().__init__(numbers)
        self._name = type(callback).__name__

    def what_was_done(self) -> list[str]:
        by = self.get("clock") or self.get("source")
        files = self.get("files", [])
        measured = f"{self._name}: {self['steps']} steps measured" + (f" by {by}" if by else "")
        return [measured, *([f"{len(files)} files, the last is {files[-1]}"] if files else [])]

    def what_was_measured(self) -> list[str]:
        sizes = [f"{_words(name, '_bytes')}: {show_bytes(self[name])}" for name in self if name.endswith("_bytes")]
        times = [f"{_words(name, '_ms')}: {self[name]:.2f} ms" for name in self if name.endswith("_ms")]
        texts = (", ".join(sizes), ", ".join(times), self.get("note", ""))
        return [text for text in texts if text]

    def figures(self) -> dict[str, Any]:
        return dict(self)


def _words(name: str, unit: str) -> str:
    return name.removesuffix(unit).replace("_", " ")


class PhaseCallback(Callback, Generic[_Observer]):
    """Measures whole optimizer steps: picks them, listens to their batches and publishes the numbers.

    A step is the batches that one optimizer update covers: one, or as many as are accumulated; with manual
    optimization always one batch. Counting starts anew with each ``fit``.

    Args:
        every_n_steps: measure each n-th step after the warm-up; ``None`` measures one step a ``fit``.
        warm_up: steps a ``fit`` that are not measured at its start.
        log: send the numbers to the trainer's loggers.

    Raises:
        ValueError: when a number is too small.
        TypeError: when one is not an integer.
    """

    @checked
    def __init__(
        self, every_n_steps: Annotated[int, AtLeast(1)] | None, warm_up: Annotated[int, AtLeast(0)], log: bool
    ) -> None:
        self.every_n_steps = every_n_steps
        self.warm_up = warm_up
        self._publishes = log  # Lightning puts the module's log method at `callback.log`
        self._seen = self._measured = 0  # in this fit
        self._under_way = False
        self._global_step = 0
        self._phases: StrategyPhases | None = None
        self._observer: _Observer | None = None
        """Only while a step is measured: some cannot be sent to other processes."""

    @abstractmethod
    def _begin_step(self, trainer: Trainer, pl_module: LightningModule) -> _Observer:
        """Return the observer that measures each batch of the step that begins."""

    @abstractmethod
    def _end_step(self, trainer: Trainer, global_step: int, observer: _Observer) -> None:
        """All batches of the step are measured; ``global_step`` is the trainer's count before it."""

    def _check_writable(self, trainer: Trainer, folder: Path) -> None:
        """Raise before training what writing into the folder would raise in the middle of it; makes nothing.

        Raises:
            OSError: nothing can be written there.
        """
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        try:
            if trainer.is_global_zero:
                tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{type(self).__name__} cannot write into {str(folder)!r} ({error.strerror}): give another dirpath",
            ) from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._abandon()
        self._seen = self._measured = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._under_way:
            self._under_way = True
            self._global_step = trainer.global_step
            self._observer = self._begin_step(trainer, pl_module) if self._due() else None
        if self._observer is not None:
            self._observer.start()
            self._phases = StrategyPhases(trainer.strategy, self._observer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._release()
        if not self._under_way:
            return  # Lightning starts no batch that is None, but it ends it
        if pl_module.automatic_optimization and trainer.global_step == self._global_step:
            return  # this batch's gradients are being accumulated: the step goes on
        self._under_way = False
        self._seen += 1
        observer, self._observer = self._observer, None
        if observer is not None:
            self._measured += 1
            self._end_step(trainer, self._global_step, observer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._abandon()  # on_train_batch_start may have returned -1, which ends the epoch without ending the batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._abandon()
        if self._seen and not self._measured:
            warn_no_effect(
                f"{type(self).__name__} measured 0 of {self._seen} steps, since it leaves out the first "
                f"warm_up={self.warm_up}: train longer, or give a smaller warm_up."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._abandon()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._abandon()

    def _due(self) -> bool:
        past_warm_up = self._seen - self.warm_up
        if self.every_n_steps is None:
            return past_warm_up == 0
        return past_warm_up >= 0 and past_warm_up % self.every_n_steps == 0

    def _release(self) -> None:
        if self._phases is None or self._observer is None:
            return
        self._phases.detach()
        self._phases = None
        self._observer.stop()

    def _abandon(self) -> None:
        self._release()
        self._under_way, self._observer = False, None

    def _publish(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Send ``metrics`` to the loggers in a row of their own.

        ``LightningModule.log`` would repeat a value in every later row and drop it where ``log_every_n_steps`` does not
        meet the measured step; the user's own rows are left alone this way.
        """
        if not self._publishes:
            return
        # The loggers' x axis: the built-in monitors read it here too, so that the rows line up.
        step = logged_step(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        # Where there is no logger the numbers are still at hand; float64, as bytes do not fit into float32.
        trainer.callback_metrics.update({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()})
