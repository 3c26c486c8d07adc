"""The tasks of a pipeline that really ran: drawn as a PNG, a page for a browser and a Chrome trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retime.callbacks.support.phases import check_can_draw, folder_of, write_timeline
from retime.foundations.arguments import AtLeast, checked
from retime.foundations.messages import warn_no_effect
from retime.strategies import OOOPipelineStrategy


class PipelineTimeline(Callback):
    """Draws which rank of ``ooo_pipeline`` ran which task when: F, O and W of each stage and micro-batch.

        trainer = Trainer(strategy="ooo_pipeline", devices=4, callbacks=[PipelineTimeline()])

    Rank zero writes, for the first pipeline. The files are named by optimizer step.

    Args:
        every_n_steps: draw each n-th batch of a fit.
        dirpath: folder for the files; the default is ``pipeline`` in the trainer's ``log_dir``.
        png: draw ``<step>.png``; needs matplotlib.
        trace: write ``<step>.json``, a Chrome trace for https://ui.perfetto.dev.
        page: write ``<step>.html``: all ranks, to zoom into, with the bubble share of each; it needs no other file.

    Attributes:
        files: written by this process.

    Raises:
        ValueError: when ``every_n_steps`` is below 1; at the start of ``fit``, under another strategy.
        ModuleNotFoundError: when ``png=True`` and matplotlib is not installed.
    """

    @checked
    def __init__(
        self,
        every_n_steps: Annotated[int, AtLeast(1)] = 100,
        dirpath: str | os.PathLike[str] | None = None,
        png: bool = True,
        trace: bool = True,
        page: bool = True,
    ) -> None:
        if png:
            check_can_draw(self)
        self.every_n_steps, self.dirpath = every_n_steps, dirpath
        self.png, self.trace, self.page = png, trace, page
        self.files: list[Path] = []
        self._folder = Path()
        self._batches = 0  # of this fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, OOOPipelineStrategy):
            raise ValueError(
                f"PipelineTimeline draws what strategy='ooo_pipeline' did, and this Trainer has "
                f"{type(trainer.strategy).__name__}: use StepTimeline"
            )
        self._folder = folder_of(trainer, self.dirpath, "pipeline")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if 0 < self._batches < self.every_n_steps and trainer.is_global_zero:
            warn_no_effect(
                f"PipelineTimeline drew none of {self._batches} batches, since it draws one in {self.every_n_steps}: "
                "train longer, or give a smaller every_n_steps."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches % self.every_n_steps:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, OOOPipelineStrategy)
        spans = strategy.timeline()
        if not spans or not trainer.is_global_zero:
            return
        title = f"optimizer step {trainer.global_step}: {strategy.report().schedule}"
        stem, words = self._folder / str(trainer.global_step), {"unit": "stage", "idle": "bubble"}
        self.files += write_timeline(stem, spans, title, png=self.png, trace=self.trace, page=self.page, **words)
