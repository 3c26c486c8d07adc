"""Fits in processes of Lightning's own making; prints what the strategy of the main process reports afterwards."""

import sys

import torch

import retime  # noqa: F401  (registers the names)
from contract.models import Net
from support.trainers import quiet_trainer


def main() -> None:
    inputs = torch.randn(16, 6)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sin()), batch_size=2)
    for name in sys.argv[2:]:
        trainer = quiet_trainer(strategy=name, devices=2, max_epochs=1, default_root_dir=sys.argv[1])
        trainer.fit(Net(), data)
        report = trainer.strategy.report()  # type: ignore[attr-defined]
        counted = f"{report.steps} steps" if hasattr(report, "steps") else report.headline
        print(f"{name}: {type(report).__name__} of {counted}", flush=True)


if __name__ == "__main__":
    main()
