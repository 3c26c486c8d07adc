"""What a network answers to images that it does not train on, every so many steps of a fit."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

__all__ = ["CheckedOutputs"]


class CheckedOutputs(Callback):
    """Answers and how many are right; the time that takes is not the fit's.

    Args:
        every: steps.
        batch: images ``(B, C, H, W)`` and their classes ``(B,)``.

    Attributes:
        answers: of each check, shape ``(B, classes)``.
        right: share of the images, of each check.
        seconds: of training before each check.
    """

    def __init__(self, every: int, batch: tuple[Tensor, Tensor]) -> None:
        self._every = every
        self._images, self._classes = batch
        self._began = self._checking = 0.0
        self.answers: list[Tensor] = []
        self.right: list[float] = []
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % self._every:
            return
        began = time.perf_counter()
        pl_module.eval()
        with torch.no_grad():
            answers = pl_module(self._images)
        pl_module.train()
        self.answers.append(answers)
        self.right.append(float((answers.argmax(1) == self._classes).double().mean()))
        self.seconds.append(began - self._began - self._checking)
        self._checking += time.perf_counter() - began
