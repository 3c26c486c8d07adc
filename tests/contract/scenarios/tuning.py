"""Lightning's tuners: they borrow the strategy's optimizers, run some steps, and put everything back."""

from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch.optim import Adam

from contract.bench import Bench
from contract.models import Net
from contract.registry import scenario


class Tunable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.02, 2

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=self.lr)


class Sized(Tunable):
    """Serves its own data in the batch size that the finder sets."""

    serves_data = True

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._loader = bench.loader

    def train_dataloader(self) -> Any:
        return self._loader(batch=self.batch_size, batches=40 // self.batch_size)

    def val_dataloader(self) -> Any:
        return self._loader(batches=1)


@scenario()
def lr_finder(bench: Bench) -> None:
    trainer, module = bench.trainer(), Tunable()
    finder = Tuner(trainer).lr_find(module, bench.loader(), num_training=24, min_lr=1e-4, max_lr=0.1)
    bench.keep("finder", {"results": finder.results, "suggestion": finder.suggestion(), "lr": module.lr})
    bench.keep("weights after the search", module.state_dict())
    bench.fit(module, trainer)


@scenario(single="Lightning does not tune the batch size across ranks")
def batch_size_finder(bench: Bench) -> None:
    module = Sized(bench)
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2)
    trainer = bench.trainer(callbacks=[finder])
    bench.fit(module, trainer)
    bench.keep("batch size", finder.optimal_batch_size)


@scenario(single="Lightning does not tune the batch size across ranks")
def batch_size_tuner(bench: Bench) -> None:
    trainer, module = bench.trainer(), Sized(bench)
    Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    bench.keep("batch size", module.batch_size)
    bench.fit(module, trainer)
