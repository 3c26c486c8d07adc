"""One rank's fits, a strategy after the other; prints the lines of the fits' log that are ours."""

import logging
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist

import retime  # noqa: F401  (registers the names)
from contract.models import Net
from support.trainers import quiet_trainer


class Ours(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()).startswith("retime: "):
            self.lines.append(text)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours = Ours()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(ours)
    inputs = torch.randn(16, 6)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sin()), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fused_optimizer_ddp", "ooo_ddp", "cpu_accumulate_ddp", "memory_budget_ddp", "ooo_pipeline"):
            quiet_trainer(strategy=name, devices=2, max_epochs=1, default_root_dir=folder).fit(Net(), data)
            for line in ours.lines[:1] + ours.lines[1:][-1:]:  # between them others tell of searches and plans
                print(line, flush=True)
            ours.lines.clear()
    dist.barrier()
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


if __name__ == "__main__":
    sys.exit(main())
