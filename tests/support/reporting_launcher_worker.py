"""Fits in processes of Lightning's own making; prints what the strategy of the main process reports afterwards."""

import sys

import torch
from lightning.pytorch import Trainer

import retime  # noqa: F401  (registers the names)
from contract.models import Net


def main() -> None:
    inputs = torch.randn(16, 6)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sin()), batch_size=2)
    for name in sys.argv[2:]:
        trainer = Trainer(
            strategy=name, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
        )  # fmt: skip
        trainer.fit(Net(), data)
        report = trainer.strategy.report()  # type: ignore[attr-defined]
        counted = f"{report.steps} steps" if hasattr(report, "steps") else report.headline
        print(f"{name}: {type(report).__name__} of {counted}", flush=True)


if __name__ == "__main__":
    main()
