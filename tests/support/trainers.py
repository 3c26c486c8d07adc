"""Trainers that print nothing and write nothing."""

from typing import Any

from lightning.pytorch import Trainer


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
