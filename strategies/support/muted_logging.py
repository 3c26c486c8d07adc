"""Steps that are only tried out log nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from retime.foundations.replaced_attributes import replaced_attributes


@contextmanager
def muted_logging(trainer: Trainer, noticed: Callable[[], None] | None = None) -> Iterator[None]:
    """While open, the module's ``log`` and the Trainer's loggers take nothing.

    Args:
        trainer: of the step that is tried out.
        noticed: is called where the step asks a logger of the Trainer's to write.
    """
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() if noticed is None else _NoticingLogger(noticed) for _ in loggers]
    try:
        with replaced_attributes(trainer.lightning_module, log=_log_nothing, log_dict=_log_nothing):
            yield
    finally:
        trainer.loggers = loggers


class _NoticingLogger(DummyLogger):
    """Takes nothing, and tells that it was asked to."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        super().__init__()
        self._noticed = noticed

    @property
    def experiment(self) -> Any:
        self._noticed()
        return super().experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._noticed()


def _log_nothing(*_: Any, **__: Any) -> None:
    pass
