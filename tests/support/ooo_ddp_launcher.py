"""Trains with `ooo_ddp_spawn` or `ooo_ddp_fork` in two processes of Lightning's own making."""

import sys

from lightning.pytorch import Callback, Trainer
from torch import nn

import retime  # noqa: F401  (registers the names)
from contract.models import Net, sines
from support.trainers import quiet_trainer


class Tell(Callback):
    def on_train_end(self, trainer: Trainer, *args: object) -> None:
        report = trainer.strategy.report()  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            print(f"steps: {report.steps}, blocks: {report.blocks}, updates: {report.fused_updates > 0}", flush=True)


def main() -> None:
    wide = nn.Sequential(nn.Linear(6, 160), nn.Linear(160, 160), nn.Linear(160, 160), nn.Linear(160, 6))
    options = {"devices": 2, "max_epochs": 1, "default_root_dir": sys.argv[2], "callbacks": [Tell()]}
    trainer = quiet_trainer(strategy=f"ooo_ddp_{sys.argv[1]}", **options)
    trainer.fit(Net(wide), sines(32))
    print(f"brought home: {trainer.strategy.report().steps} steps", flush=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
