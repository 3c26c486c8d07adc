"""Trainers that print nothing and write nothing, and what fits warn of all the same."""

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import Logger

IGNORED_WARNINGS = [  # what Lightning and torch themselves warn of
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class MemoryLogger(Logger):
    """Keeps what Lightning logs, in order, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to compare."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append({"step": step, **metrics})


def quiet_trainer(**options: Any) -> Trainer:
    """A Trainer on one processor; `options` are the Trainer's and come first."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**quiet | options)
