"""Which files of retime one batch passes, in order of first entry: what docs/architecture.md tells.

    python tests/support/passed_files.py fused_optimizer
    python tests/support/passed_files.py memory_budget --budget 1.6MiB [--batch 0]      # batch 0: with planning
    python tests/support/passed_files.py memory_budget --budget 2.3MiB --batchnorm      # whole batches: offloading
    python tests/support/passed_files.py scan
    python tests/support/passed_files.py ooo_pipeline --calls 20        # and who is entered from another file how often

Prints how many files there are, how often calls go back to a file that was entered before, the files, and the report.
A function counts where it is entered from another file; a generator that goes on does not.
"""

import argparse
import dis
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retime

ROOT = f"{Path(__file__).parents[2]}/"
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""No functions: frames of their own up to Python 3.11."""
ELSEWHERE = ("tests/", ".venv", "build/")


@cache
def beginning(code: CodeType) -> int:
    """Where a frame of this code stands when it is entered, and not when a generator goes on."""
    return min(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")


class Passed:
    """Notes the files of calls while it is on; threads that start later are followed too, each by itself."""

    def __init__(self) -> None:
        self.on = False
        self.visits: list[str] = []
        self.calls: Counter[str] = Counter()
        self._thread = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if not self.on or event != "call" or not file.startswith(ROOT) or code.co_name in INLINED:
            return
        if frame.f_lasti > beginning(code):
            return
        file = file.removeprefix(ROOT)
        if not file.startswith(ELSEWHERE) and getattr(self._thread, "last", None) != file:
            self._thread.last = file
            self.visits.append(file)
            self.calls[f"{file} {code.co_qualname}"] += 1


class OnOneBatch(L.Callback):
    """Switches on for one batch, of the main process. Before it the main thread is not followed: plans take long so."""

    def __init__(self, passed: Passed, batch: int) -> None:
        self.passed, self.batch = passed, batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.passed.on = index == self.batch
        if self.passed.on:
            sys.setprofile(self.passed)

    def on_train_batch_end(self, trainer: Any, module: Any, output: Any, batch: Any, index: int) -> None:
        self.passed.on = False
        sys.setprofile(None)


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
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--calls", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    budget = chosen.name.startswith("memory")
    torch.use_deterministic_algorithms(budget)  # plans are then chosen by counted bytes, the same in every run
    width, samples = (64, 512) if budget else (256, 64)
    devices = 2 if "ddp" in chosen.name or "pipeline" in chosen.name else 1
    count = (chosen.batch + 2) * samples * (devices if "ddp" in chosen.name else 1)
    data = TensorDataset(torch.randn(count, width), torch.randint(4, (count,)))
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
    elif chosen.name == "ooo_single_device":
        strategy = retime.OOOSingleDeviceStrategy(threads=(1, 1))  # the search has ended
    elif chosen.name == "ooo_ddp":
        strategy = retime.OOODataParallelStrategy(k=2)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    threading.setprofile(passed)
    trainer.fit(Module(network(chosen.name, width, chosen.batchnorm)), DataLoader(data, batch_size=samples))
    if trainer.is_global_zero:
        files = list(dict.fromkeys(passed.visits))
        print(f"{len(files)} files, {len(passed.visits) - len(files)} returns", *files, sep="\n  ")
        for call, times in passed.calls.most_common(chosen.calls):
            print(f"{times:4} {call}")
        print(trainer.strategy.report() if hasattr(trainer.strategy, "report") else callbacks[-1].report())


if __name__ == "__main__":
    main()
