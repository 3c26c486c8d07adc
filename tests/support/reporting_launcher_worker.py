"""Fits in processes of Lightning's own making; prints what the strategy of the main process reports afterwards."""

import sys

import retime  # noqa: F401  (registers the names)
from contract.models import Net, sines
from support.trainers import quiet_trainer


def main() -> None:
    for name in sys.argv[2:]:
        trainer = quiet_trainer(strategy=name, devices=2, max_epochs=1, default_root_dir=sys.argv[1])
        trainer.fit(Net(), sines(16))
        report = trainer.strategy.report()  # type: ignore[attr-defined]
        counted = f"{report.steps} steps" if hasattr(report, "steps") else report.headline
        print(f"{name}: {type(report).__name__} of {counted}", flush=True)


if __name__ == "__main__":
    main()
