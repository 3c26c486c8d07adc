"""Steps that are only tried out log nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from retime.mechanisms.replaced_attributes import replaced_attributes


@contextmanager
def muted_logging(trainer: Trainer) -> Iterator[None]:
    """While open, the module's ``log`` and the Trainer's loggers take nothing."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with replaced_attributes(trainer.lightning_module, log=_log_nothing, log_dict=_log_nothing):
            yield
    finally:
        trainer.loggers = loggers


def _log_nothing(*_: Any, **__: Any) -> None:
    pass
