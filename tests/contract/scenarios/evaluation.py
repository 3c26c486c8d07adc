"""Validation, test and prediction around and inside training."""

from typing import Any

import torch
from lightning.pytorch import Callback

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import fits, scenario


@scenario()
def validate_test_predict(bench: Bench) -> None:
    trainer, module, loader = bench.trainer(), Net(), bench.loader(batches=2)
    bench.keep("before", trainer.validate(module, loader, verbose=False))
    bench.fit(module, trainer, val=loader)
    bench.keep("validated", trainer.validate(module, loader, verbose=False))
    bench.keep("tested", trainer.test(module, loader, verbose=False))
    bench.keep("predicted", trainer.predict(module, loader))


@scenario()
def evaluate_in_a_new_trainer(bench: Bench) -> None:
    module = Net()
    bench.fit(module)
    bench.keep("tested", bench.trainer().test(module, bench.loader(batches=2), verbose=False))
    bench.keep("tested plainly", bench.trainer(plain=True).test(module, bench.loader(batches=2), verbose=False))


class PredictsBetweenBatches(Callback):
    """Runs the module under inference_mode in the middle of training, as a sample logger does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            pl_module.trace.append({"sample": pl_module(batch[0]).clone()})


class PredictsInStep(Net):
    """Runs itself without gradients before its own training forward."""

    without: Any = torch.inference_mode

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.without():
            self.trace.append({"sample": self(batch[0]).sum().item()})
        return super().training_step(batch, batch_idx)


class PredictsWithoutGrad(PredictsInStep):
    without = torch.no_grad


fits(
    validation_mid_epoch=lambda bench: bench.fit(Net(), val=bench.loader(batches=2), val_check_interval=2),
    validation_mid_window=lambda bench: bench.fit(
        Net(), val=bench.loader(batches=2), val_check_interval=1, accumulate_grad_batches=2
    ),
    validation_with_sanity_check=lambda bench: bench.fit(
        Net(optimizer=sgd), val=bench.loader(batches=2), num_sanity_val_steps=2, check_val_every_n_epoch=2
    ),
    validation_without_inference_mode=lambda bench: bench.fit(Net(), val=bench.loader(batches=1), inference_mode=False),
    fast_dev_run=lambda bench: bench.fit(Net(), val=bench.loader(batches=1), fast_dev_run=2),
    anomaly_detection=lambda bench: bench.fit(Net(), detect_anomaly=True),
    limited_batches_new_loaders=lambda bench: bench.fit(
        Net(), limit_train_batches=2, reload_dataloaders_every_n_epochs=1
    ),
    shuffled_data=lambda bench: bench.fit(Net(), loader=bench.loader(shuffle=True)),
    inference_between_batches=lambda bench: bench.fit(Net(), callbacks=[PredictsBetweenBatches()]),
    inference_in_training_step=lambda bench: bench.fit(PredictsInStep()),
    no_grad_forward_in_training_step=lambda bench: bench.fit(PredictsWithoutGrad()),
)
