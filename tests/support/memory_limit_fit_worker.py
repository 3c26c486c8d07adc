"""Fits in a process of its own: one without a limit, and the same again under a limit of data bytes.

    python memory_limit_fit_worker.py FOLDER plain|BUDGET_BYTES LIMIT_BYTES

Prints one line of JSON: the losses of both fits, or the second's ``error``, and what memory it took. The limit holds
from the second batch on: plans are made with the first. It counts from what the process had before the second fit.
"""

import gc
import json
import resource
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from retime.foundations.cpu_pool.pool import give_back_freed_memory, trim_heap
from retime.foundations.measure import MemoryProbe, status_bytes
from retime.strategies import MemoryBudgetStrategy
from support.garbage import pass_over_what_is_there
from support.trainers import quiet_trainer

SAMPLES, WIDTH, DEPTH, CLASSES, BATCHES = 4096, 256, 12, 10, 3


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Made when they are asked for, so that only the one in use takes memory."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        return inputs, inputs[:, :CLASSES].argmax(1)


class Classifier(LightningModule):
    """Its activations are nearly all of its memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Limit(Callback):
    """Takes the room away, and watches what is used, from the second batch on."""

    def __init__(self, limit_bytes: int) -> None:
        self.bound = status_bytes("VmData") + limit_bytes
        self.probe = MemoryProbe("cpu")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            set_limit(self.bound)
            self.probe.start()

    def on_train_end(self, *_: Any) -> None:
        self.probe.stop()


def set_limit(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def fit(folder: str, budget: str, *callbacks: Callback) -> tuple[Classifier, Any]:
    """The module, and the strategy, after training."""
    module = Classifier()
    strategy: Any = "auto" if budget == "plain" else MemoryBudgetStrategy(int(budget), host=f"disk:{folder}")
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[*callbacks])
    trainer.fit(module, DataLoader(Batches(), batch_size=None))
    return module, trainer.strategy


def limited(folder: str, budget: str, limit_bytes: int) -> dict[str, Any]:
    base, limit = status_bytes("VmRSS"), Limit(limit_bytes)
    try:
        module, strategy = fit(folder, budget, limit)
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        set_limit(resource.getrlimit(resource.RLIMIT_DATA)[1])
    outcome: dict[str, Any] = {"losses": module.losses, "source": limit.probe.source}
    if budget != "plain":
        report = strategy.report()
        outcome |= {"predicted": report.shapes[-1].choice.peak_bytes, "plan": str(report), "plans": report.plans}
    return outcome | {"measured": limit.probe.peaks()["batch"] - base}


def main() -> None:
    folder, budget, limit_bytes = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    pass_over_what_is_there()
    give_back_freed_memory()
    module, _ = fit(folder, budget)  # what libraries keep from now on is code, not the model's
    losses = module.losses
    del module, _
    gc.collect()
    trim_heap()
    print(json.dumps({"free": losses, "limited": limited(folder, budget, int(limit_bytes))}))


if __name__ == "__main__":
    main()
