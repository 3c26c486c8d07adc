"""What a ``transformers.Trainer`` was given is put on when a training begins, and taken off when ``train()`` ends.

A ``TrainerCallback`` hears of the beginning: then the model is wrapped, the optimizer prepared, a checkpoint loaded. No
callback hears of an error, so this trainer's ``train`` gets a method in front of it. Nothing is patched but this one
trainer, and nothing of it is left once the last object is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback

from retime.foundations.compatibility import Mechanism, refuse, why_aside
from retime.foundations.messages import warn_no_effect
from retime.foundations.patching import layered_methods
from retime.integrations.accelerate.prepared import ONE_PROCESS_OR_DDP


class Removable(Protocol):
    """An object for Accelerate, as far as it is needed here."""

    def report(self) -> Any:
        """Report of what was done so far."""

    def remove(self) -> None:
        """Take everything off again."""


_Report = TypeVar("_Report")


class DuringTraining(Generic[_Report]):
    """A mechanism that a trainer has from now on, in each ``train()``.

    Classes that inherit say in :meth:`_make` which object for Accelerate works, and in :meth:`_check` what they refuse.

    Args:
        trainer: before ``train()``.
        mechanism: what must go together with those that the trainer was given already.
        report: before the first training.

    Raises:
        ValueError: an engine other than one device or DistributedDataParallel, or two objects that do not go together.
    """

    def __init__(self, trainer: Trainer, mechanism: Mechanism, report: _Report) -> None:
        self._trainer, self._mechanism = trainer, mechanism
        self._report: _Report = report
        self._made: Removable | None = None
        self._on = ExitStack()
        self._check_engine()
        self._check()
        self._given = _Given.to(trainer)
        there = [other._mechanism for other in self._given.objects]
        refuse(mechanism, there)
        aside = why_aside(mechanism, there)
        if aside is not None:  # a strategy would warn and run the plain way
            raise ValueError(f"{aside}, which is FusedOptimizer(trainer, mode='forward') here")
        self._given.add(self)

    def remove(self) -> None:
        """Take it off for good: ``train()`` runs the plain way from now on. During a training, from this moment on."""
        self.take_off()
        self._given.drop(self)

    def report(self) -> _Report:
        """Report of what was done in this training, or in the last one."""
        report: _Report = self._report if self._made is None else self._made.report()
        return report

    def _check_engine(self) -> None:
        name, engine = type(self).__name__, self._trainer.accelerator.distributed_type
        if engine not in ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"{name} runs on one device or under DistributedDataParallel, and this trainer has {engine}: "
                "leave out TrainingArguments(deepspeed=..., fsdp=...) and the like"
            )
        if self._trainer.args.n_gpu > 1:
            raise ValueError(
                f"with one process and {self._trainer.args.n_gpu} GPUs the Trainer uses DataParallel, which copies "
                f"parameters in each step, and {name} does not go with that: start a process a GPU (torchrun), "
                "or show one GPU only (CUDA_VISIBLE_DEVICES=0)"
            )

    def _check(self) -> None:
        """Raise for what cannot be kept equal; called when the object is made and when a training begins."""

    def _make(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Removable:
        """Return the object for Accelerate, put on; what else is put on goes to ``self._on``."""
        raise NotImplementedError

    def _ended(self, method: Removable) -> None:
        """A training is over, or has failed, and nothing of it is taken off yet."""

    def put_on(self) -> None:
        """A training begins: the model is wrapped, the optimizer is prepared, and a checkpoint is loaded."""
        self._check_engine()
        self._check()
        trainer = self._trainer
        with ExitStack() as undo:
            undo.callback(self._on.close)
            self._made = self._make(trainer.accelerator, trainer.model_wrapped, trainer.optimizer)
            undo.pop_all()

    def take_off(self) -> None:
        """A training is over, or has failed; also called where none has begun."""
        method, self._made = self._made, None
        with self._on:
            if method is not None:
                self._report = method.report()
                with ExitStack() as last:
                    last.callback(method.remove)
                    self._ended(method)


class _Given(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """All objects that one trainer was given, in order."""

    def __init__(self, trainer: Trainer) -> None:
        self.objects: list[DuringTraining[Any]] = []
        self._trainer = trainer
        self._plain: Callable[..., Any] = trainer.train
        self._in_train = self._begun = False
        self._patch = ExitStack()

    @classmethod
    def to(cls, trainer: Trainer) -> _Given:
        """Record of what the trainer was given already, or of nothing yet."""
        callbacks = (one for one in trainer.callback_handler.callbacks if isinstance(one, cls))
        return next(callbacks, None) or cls(trainer)

    def add(self, one: DuringTraining[Any]) -> None:
        """Put it on from the next training on."""
        if not self.objects:
            self._trainer.add_callback(self)
            self._plain = self._trainer.train
            self._patch.enter_context(layered_methods(self._trainer, train=self._train))
        self.objects.append(one)

    def drop(self, one: DuringTraining[Any]) -> None:
        """It is put on no more; perhaps for the second time."""
        if one in self.objects:
            self.objects.remove(one)
            if not self.objects:
                self._trainer.remove_callback(self)
                self._patch.close()

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        names = " and ".join(type(one).__name__ for one in self.objects)
        self._in_train, self._begun = True, False
        try:
            with ExitStack() as stack:
                stack.callback(self._take_off)
                output = self._plain(*args, **kwargs)
        finally:
            self._in_train = False
        if not self._begun:
            warn_no_effect(
                f"{names} had no effect: the train() of {type(self._trainer).__name__} does not call on_train_begin"
            )
        return output

    def _take_off(self) -> None:
        with ExitStack() as stack:  # the last first, and all of them even if one raises
            for one in self.objects:
                stack.callback(one.take_off)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Put the objects on."""
        if not self._in_train:
            names = " and ".join(type(one).__name__ for one in self.objects)
            warn_no_effect(f"{names} had no effect on this training, which had already begun: give it before train()")
            return
        self._take_off()  # auto_find_batch_size begins again with fewer samples
        self._begun = True
        for one in self.objects:
            one.put_on()
