"""Set or tune the k of out-of-order data parallel from a callback."""

from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.out_of_order import K
from retime.strategies.ooo_ddp import OOODataParallelStrategy
from retime.strategies.support.base import refuse_other_trainer


class ReverseFirstK(Callback):
    """Choose how many blocks ``strategy="ooo_ddp"`` re-orders, and when to search for it again.

    The best k depends on the network's speed and on the batch, which may change while a job runs: a busier cluster, a
    batch-size schedule, unfrozen layers.

    Args:
        k: a number of blocks, or ``"auto"``: measure during the first steps.
        search_every_n_epochs: with ``k="auto"``, search again at the start of every n-th epoch; None: once.
        log: log ``"reverse_first_k"`` with the Trainer's loggers at the end of every epoch.
    """

    @checked
    def __init__(
        self, k: K = "auto", search_every_n_epochs: Annotated[int, AtLeast(1)] | None = None, log: bool = True
    ) -> None:
        if search_every_n_epochs is not None and k != "auto":
            raise ValueError(f"search_every_n_epochs={search_every_n_epochs} needs k='auto', got k={k!r}")
        self.k = k
        self.search_every_n_epochs = search_every_n_epochs
        self._logs = log  # Lightning puts the module's log method at `callback.log`

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_other_trainer(trainer)
        strategy = trainer.strategy
        if not isinstance(strategy, OOODataParallelStrategy):
            raise ValueError(
                f"ReverseFirstK sets the k of strategy='ooo_ddp', and this Trainer has {type(strategy).__name__}: use "
                "Trainer(strategy='ooo_ddp')"
            )
        if stage == "fit":
            strategy.set_k(self.k)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch, every = trainer.current_epoch, self.search_every_n_epochs
        if every is not None and epoch > 0 and epoch % every == 0:
            self._strategy_of(trainer).set_k("auto")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._logs:
            k: Any = self._strategy_of(trainer).k
            pl_module.log("reverse_first_k", float(k), rank_zero_only=True)

    def _strategy_of(self, trainer: Trainer) -> OOODataParallelStrategy:
        strategy = trainer.strategy
        assert isinstance(strategy, OOODataParallelStrategy)
        return strategy
