"""Steps that are only tried out: nobody hears of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger


@contextmanager
def unseen(trainer: Trainer) -> Iterator[None]:
    """While open, the module's ``log`` and the Trainer's loggers take nothing."""
    module, loggers = trainer.lightning_module, trainer.loggers
    own = module.__dict__
    trainer.loggers = [DummyLogger() for _ in loggers]
    own["log"] = own["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in ("log", "log_dict"):
            own.pop(name, None)
