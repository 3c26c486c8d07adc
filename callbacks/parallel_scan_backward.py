"""The backward pass of recurrent modules as a parallel scan, as a Lightning callback."""

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from retime.foundations.arguments import checked
from retime.mechanisms.scan import check_solver
from retime.modules import ConversionReport, convert, convert_back
from retime.modules.obstacles import obstacles


class ParallelScanBackward(Callback):
    """Train a model's RNN, GRU and LSTM with a parallel-scan backward pass (BPPSA, Wang et al. 2020).

    Converts what exists at `setup`, before any optimizer is made, and modules that `setup()` or `configure_model()`
    build later when the fit starts. Parameters and modules stay the same objects, so optimizers, wrappers and
    checkpoints work unchanged: a checkpoint loads in a Trainer without this callback and the reverse. At the end the
    modules become torch.nn's again. Modules that the user converted keep their solver and stay converted.

    Args:
        solver: of all converted modules; see :class:`retime.ScanGRU`.
        names: which modules, as in `LightningModule.named_modules()`; None means all.

    Raises:
        ValueError: an unknown solver; when the fit starts, a name that cannot be converted.
    """

    @checked
    def __init__(self, solver: str = "auto", names: str | Iterable[str] | None = None) -> None:
        check_solver(solver)
        self.solver = solver
        self.names = None if names is None else [names] if isinstance(names, str) else list(names)
        self._converted: dict[str, nn.Module] = {}
        self._report = ConversionReport()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()
        self._report = ConversionReport()
        if stage == "fit":
            self._convert(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._convert(pl_module)
        absent = [name for name in self.names or () if name not in self._converted]
        if absent:
            convert(pl_module, self.solver, absent)  # raises with the reason
        elif self.names is None and not self._converted and trainer.is_global_zero:
            convert(pl_module, self.solver)  # warns with the reasons
        left = [(name, why) for name, why in obstacles(pl_module).items() if name not in self._converted]
        self._report.skipped.update({name: why for name, why in left if why is not None})
        rank_zero_info(f"retime: {self._report.headline}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning does not call teardown after an exception
        self._finish()

    def report(self) -> ConversionReport:
        """Report on what the last fit converted, and what it left as it was and why."""
        return self._report

    def _convert(self, pl_module: LightningModule) -> None:
        free = [name for name, why in obstacles(pl_module).items() if why is None]
        ready = [name for name in free if self.names is None or name in self.names]
        if ready:
            self._report.swapped.update(convert(pl_module, self.solver, ready).swapped)
            self._converted.update({name: pl_module.get_submodule(name) for name in ready})

    def _finish(self) -> None:
        if self._converted:
            rank_zero_info(f"retime: {self._report.headline}")
        for module in self._converted.values():
            convert_back(module)
        self._converted = {}
