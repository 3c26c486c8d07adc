"""Validation, test and prediction around and inside training."""

from typing import Any

import torch
from lightning.pytorch import Callback

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import scenario


@scenario()
def validation_mid_epoch(bench: Bench) -> None:
    bench.fit(Net(), val=bench.loader(batches=2), val_check_interval=2)


@scenario()
def validation_mid_window(bench: Bench) -> None:
    bench.fit(Net(), val=bench.loader(batches=2), val_check_interval=1, accumulate_grad_batches=2)


@scenario()
def validation_with_sanity_check(bench: Bench) -> None:
    bench.fit(Net(optimizer=sgd), val=bench.loader(batches=2), num_sanity_val_steps=2, check_val_every_n_epoch=2)


@scenario()
def validation_without_inference_mode(bench: Bench) -> None:
    bench.fit(Net(), val=bench.loader(batches=1), inference_mode=False)


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


@scenario()
def fast_dev_run(bench: Bench) -> None:
    bench.fit(Net(), val=bench.loader(batches=1), fast_dev_run=2)


@scenario()
def anomaly_detection(bench: Bench) -> None:
    bench.fit(Net(), detect_anomaly=True)


@scenario()
def limited_batches_new_loaders(bench: Bench) -> None:
    bench.fit(Net(), limit_train_batches=2, reload_dataloaders_every_n_epochs=1)


@scenario()
def shuffled_data(bench: Bench) -> None:
    bench.fit(Net(), loader=bench.loader(shuffle=True))


class PredictsBetweenBatches(Callback):
    """Runs the module under inference_mode in the middle of training, as a sample logger does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            pl_module.trace.append({"sample": pl_module(batch[0]).clone()})


class PredictsInStep(Net):
    """Runs itself under inference_mode before its own training forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            self.trace.append({"sample": self(batch[0]).sum().item()})
        return super().training_step(batch, batch_idx)


class PredictsWithoutGrad(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.trace.append({"sample": self(batch[0]).sum().item()})
        return super().training_step(batch, batch_idx)


@scenario()
def inference_between_batches(bench: Bench) -> None:
    bench.fit(Net(), callbacks=[PredictsBetweenBatches()])


@scenario()
def inference_in_training_step(bench: Bench) -> None:
    bench.fit(PredictsInStep())


@scenario()
def no_grad_forward_in_training_step(bench: Bench) -> None:
    bench.fit(PredictsWithoutGrad())
