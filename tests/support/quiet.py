"""Lightning without its lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors_logged() -> Iterator[None]:
    """Otherwise each Trainer prints five lines."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
