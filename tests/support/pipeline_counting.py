"""One rank: logs numbers that are no means over samples, draws, and prints what is warned of."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics

from retime import PipelineTimeline
from support.pipeline_fits import Classifier, loader, trainer


class Counting(Classifier):
    """Logs a count, a standard deviation, and a metric in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[1])))
        self.log("spread", batch[0].std())
        self.recent(batch[0].mean())
        self.log("recent", self.recent)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = Path(sys.argv[1])
        draws = PipelineTimeline(2, folder / "drawn")
        fit = trainer("ooo_pipeline", folder, devices=2, max_steps=2, callbacks=[draws])
        fit.fit(Counting(), loader(), loader())
    for warning in caught:
        print(warning.message)
