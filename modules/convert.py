"""`convert`: let the recurrent modules of any model go backward as a parallel scan, and `convert_back`.

A module keeps its identity and everything it holds, and changes its class. Hence parameters stay the objects that
optimizers know, tied parameters stay tied, and hooks, training mode, dtype, device, compiled and data-parallel
wrappers around it stay as they are; the model itself may be the torch.nn.GRU that is converted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from retime.foundations.arguments import checked
from retime.foundations.messages import Report, warn_no_effect
from retime.foundations.torch_private.nn_and_optim import flat_weights
from retime.mechanisms.scan import Solver, check_solver
from retime.modules.obstacles import PLAIN, SCANS, obstacles
from retime.modules.recurrent import ScanRecurrent


@dataclass(frozen=True)
class ConversionReport(Report):
    """Names as in `model.named_modules()`; the model itself is called "".

    Attributes:
        swapped: name to what happened, "GRU -> ScanGRU".
        skipped: name to why that recurrent module stayed as it is.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def what_was_done(self) -> list[str]:
        count = len(self.swapped) + len(self.skipped)
        names = [f"{_named(name)}: {what}" for name, what in self.swapped.items()]
        return [f"{len(self.swapped)} of {count} recurrent modules converted", *names]

    def what_stayed_plain(self) -> list[str]:
        return [f"{_named(name)}: {why}" for name, why in self.skipped.items()]


def _named(name: str) -> str:
    return name or "(the model itself)"


@checked
def convert(
    model: nn.Module, solver: str | Solver = "auto", names: str | Iterable[str] | None = None
) -> ConversionReport:
    """Make ScanRNN, ScanGRU and ScanLSTM of `model`'s torch.nn.RNN, GRU and LSTM, in place.

    Args:
        model: any module; it may itself be a recurrent one.
        solver: of all converted modules; see `ScanGRU`.
        names: which modules, as in `model.named_modules()`; None means all.

    Returns:
        What was swapped, and what was skipped and why: subclasses of torch.nn's modules, projections, cells, scripted,
        parametrized, sharded and already converted modules.

    Raises:
        ValueError: an unknown solver; a name that is no recurrent module of `model`, or of one that cannot be
            converted. Nothing has been changed then.

    Warns:
        NoEffectWarning: nothing could be converted.
    """
    check_solver(solver)
    reasons = obstacles(model)
    if names is not None:
        reasons = {name: reasons[name] for name in _known(names, reasons)}
        for name, why in reasons.items():
            if why is not None:
                raise ValueError(f"convert: {name!r} cannot be converted: {why}")
    report = ConversionReport()
    for name, why in reasons.items():
        if why is not None:
            report.skipped[name] = why
            continue
        module = model.get_submodule(name)
        assert isinstance(module, nn.RNNBase)
        plain = type(module)
        _change_class(module, SCANS[plain])
        vars(module)["solver"] = solver
        report.swapped[name] = f"{plain.__name__} -> {type(module).__name__}"
    if not report.swapped:
        warn_no_effect(_nothing(model, report))
    return report


@checked
def convert_back(model: nn.Module, names: str | Iterable[str] | None = None) -> ConversionReport:
    """Make torch.nn.RNN, GRU and LSTM of `model`'s ScanRNN, ScanGRU and ScanLSTM, in place: the inverse of `convert`.

    Raises:
        ValueError: a name that is no converted module of `model`.
    """
    converted = {name: module for name, module in model.named_modules() if isinstance(module, ScanRecurrent)}
    if names is not None:
        converted = {name: converted[name] for name in _known(names, converted)}
    report = ConversionReport()
    for name, module in converted.items():
        scan = type(module)
        if scan not in PLAIN:
            report.skipped[name] = f"{scan.__name__} is a class of its own: torch.nn has no counterpart"
            continue
        del module.solver
        _change_class(module, PLAIN[scan])
        report.swapped[name] = f"{scan.__name__} -> {type(module).__name__}"
    return report


def _known(names: str | Iterable[str], modules: Mapping[str, object]) -> list[str]:
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in modules:
            there = ", ".join(repr(other) for other in modules) or "none"
            raise ValueError(f"names={names}: the model has no such module {name!r}; there are {there}")
    return names


def _nothing(model: nn.Module, report: ConversionReport) -> str:
    if not report.skipped:
        return f"convert: {type(model).__name__} has no torch.nn.RNN, GRU or LSTM, so there is no chain in time to scan"
    return f"convert: {report.one_line}"


def _change_class(module: nn.RNNBase, kind: type[nn.RNNBase]) -> None:
    module.__class__ = kind
    if _own_block(module):
        module.flatten_parameters()  # torch.nn and the scan call cuDNN on other groups of weights


def _own_block(module: nn.RNNBase) -> bool:
    """Return whether the weights alone fill one block of memory: then cuDNN's layout made it, and may change it.

    Weights inside a larger block belong to somebody who relies on their places, such as FSDP's or DeepSpeed's buffers.
    """
    weights = [weight for weight in flat_weights(module) if isinstance(weight, Tensor)]
    if len(weights) < len(flat_weights(module)) or not all(weight.is_cuda for weight in weights):
        return False
    blocks = {weight.untyped_storage().data_ptr() for weight in weights}
    size_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return len(blocks) == 1 and weights[0].untyped_storage().nbytes() == size_bytes
