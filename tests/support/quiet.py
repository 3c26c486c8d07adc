"""Lightning without its lines, and without what each Trainer looks for anew."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from lightning.fabric.utilities import registry

registry.entry_points = cache(registry.entry_points)  # all installed distributions, for callbacks that they bring


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
