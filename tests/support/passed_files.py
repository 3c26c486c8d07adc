"""Which files of retime one batch passes, in order of first entry: what docs/architecture.md tells.

    python tests/support/passed_files.py fused_optimizer
    python tests/support/passed_files.py memory_budget --budget 1.6MiB [--batch 0]      # batch 0: with planning
    python tests/support/passed_files.py memory_budget --budget 2.3MiB --batchnorm      # whole batches: offloading
    python tests/support/passed_files.py scan

Prints how many files there are, how often calls go back to a file that was entered before, the files, and the report.
Entries of functions count; a generator that goes on where it had yielded is not entered again.
"""

import argparse
import dis
import functools
import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retime

ROOT = f"{Path(__file__).parents[2]}/"
ELSEWHERE = ("tests/", ".venv", "build/")


@functools.cache
def first_instruction(code: CodeType) -> int:
    """Where a profiler sees a generator begin; it goes on from later ones."""
    return next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")


def is_entry(frame: FrameType) -> bool:
    """Whether a profiler's event "call" is a call of the frame's function."""
    code = frame.f_code
    return not code.co_flags & inspect.CO_GENERATOR or frame.f_lasti <= first_instruction(code)


class Passed:
    """Notes the files of calls while it is on; threads that start later are followed too."""

    def __init__(self) -> None:
        self.on = False
        self.visits: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if self.on and event == "call" and file.startswith(ROOT):
            file = file.removeprefix(ROOT)
            if not file.startswith(ELSEWHERE) and self.visits[-1:] != [file] and is_entry(frame):
                self.visits.append(file)


class OnOneBatch(L.Callback):
    """Switches on for one batch, of the main process."""

    def __init__(self, passed: Passed, batch: int) -> None:
        self.passed, self.batch = passed, batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.passed.on = index == self.batch

    def on_train_batch_end(self, trainer: Any, module: Any, output: Any, batch: Any, index: int) -> None:
        self.passed.on = False


class Last(nn.Module):
    """The last state of a recurrent layer's outputs."""

    def forward(self, outputs: Any) -> Any:
        return outputs[0][:, -1]


class Module(L.LightningModule):
    """A classifier by `net` that logs its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def network(name: str, width: int, batchnorm: bool) -> nn.Module:
    if name == "scan":
        return nn.Sequential(nn.Unflatten(1, (width // 2, 2)), nn.GRU(2, 8), Last(), nn.Linear(8, 4))
    layers: list[nn.Module] = []
    for _ in range(8 if name.startswith("memory") else 4):
        layers += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if batchnorm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a strategy's name, or scan")
    parser.add_argument("--budget", default="90%")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--batchnorm", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    width, samples = (64, 512) if chosen.name.startswith("memory") else (256, 64)
    data = TensorDataset(torch.randn(6 * samples, width), torch.randint(4, (6 * samples,)))
    passed = Passed()
    callbacks: list[L.Callback] = [OnOneBatch(passed, chosen.batch)]
    strategy: Any = chosen.name
    if chosen.name == "scan":
        callbacks.append(retime.ParallelScanBackward())
        strategy = "auto"
    elif chosen.name == "memory_budget":
        strategy = retime.MemoryBudgetStrategy(chosen.budget)
    elif chosen.name == "memory_budget_ddp":
        strategy = retime.MemoryBudgetDDPStrategy(chosen.budget)
    elif chosen.name == "ooo_ddp":
        strategy = retime.OOODataParallelStrategy(k=2)
    trainer = L.Trainer(
        strategy=strategy,
        devices=2 if "ddp" in chosen.name else 1,
        accelerator="cpu",
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    threading.setprofile(passed)
    sys.setprofile(passed)
    trainer.fit(Module(network(chosen.name, width, chosen.batchnorm)), DataLoader(data, batch_size=samples))
    sys.setprofile(None)
    if trainer.is_global_zero:
        files = list(dict.fromkeys(passed.visits))
        print(f"{len(files)} files, {len(passed.visits) - len(files)} returns", *files, sep="\n  ")
        print(trainer.strategy.report() if hasattr(trainer.strategy, "report") else callbacks[-1].report())


if __name__ == "__main__":
    main()
