"""The tasks of a pipeline that really ran: drawn as a PNG and a Chrome trace."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retime.foundations.arguments import AtLeast, checked
from retime.schedules.timeline import write_chrome_trace, write_png
from retime.strategies import OOOPipelineStrategy

__all__ = ["PipelineTimeline"]


class PipelineTimeline(Callback):
    """Draws which rank of ``ooo_pipeline`` ran which task when: F, O and W of each stage and micro-batch.

        trainer = Trainer(strategy="ooo_pipeline", devices=4, callbacks=[PipelineTimeline()])

    Rank zero writes, for the first pipeline. The files are named by optimizer step.

    Args:
        every_n_steps: draw each n-th batch.
        dirpath: folder for the files; the default is ``pipeline`` in the trainer's ``log_dir``.
        png: draw ``<step>.png``; needs matplotlib.
        trace: write ``<step>.json``, a Chrome trace for https://ui.perfetto.dev.

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
    ) -> None:
        if png and find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "PipelineTimeline(png=True) draws with matplotlib, which is not installed: "
                'pip install "lightning-retime[recipes]", or give png=False.'
            )
        self.every_n_steps, self.dirpath, self.png, self.trace = every_n_steps, dirpath, png, trace
        self.files: list[Path] = []
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, OOOPipelineStrategy):
            raise ValueError(
                f"PipelineTimeline draws what strategy='ooo_pipeline' did, and this Trainer has "
                f"{type(trainer.strategy).__name__}: use StepTimeline"
            )
        self._folder = Path(self.dirpath if self.dirpath is not None else Path(trainer.log_dir or ".") / "pipeline")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every_n_steps:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, OOOPipelineStrategy)
        spans = strategy.timeline()
        if not spans or not trainer.is_global_zero:
            return
        name, title = str(trainer.global_step), f"optimizer step {trainer.global_step}: {strategy.report().schedule}"
        if self.png:
            self.files.append(self._folder / f"{name}.png")
            write_png(self.files[-1], spans, title=title)
        if self.trace:
            self.files.append(self._folder / f"{name}.json")
            write_chrome_trace(self.files[-1], spans, process_name=title)
