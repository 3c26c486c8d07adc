"""Why a recurrent module cannot be converted: one function, asked before anything is changed."""

from torch import nn
from torch.nn.utils import parametrize

from retime.modules.layers import ScanGRU, ScanLSTM, ScanRNN
from retime.modules.recurrent import ScanRecurrent

SCANS: dict[type[nn.RNNBase], type[ScanRecurrent]] = {nn.RNN: ScanRNN, nn.GRU: ScanGRU, nn.LSTM: ScanLSTM}
PLAIN: dict[type[ScanRecurrent], type[nn.RNNBase]] = {scan: plain for plain, scan in SCANS.items()}
SCRIPTED = {plain.__name__ for plain in SCANS}


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a report should name `module`: torch.nn's recurrent modules, subclasses, scripted ones, cells."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase) or getattr(module, "original_name", None) in SCRIPTED


def obstacles(model: nn.Module) -> dict[str, str | None]:
    """Every recurrent module of `model` by name, with why it cannot be converted, or None."""
    return {name: obstacle(module) for name, module in model.named_modules() if is_recurrent(module)}


def obstacle(module: nn.Module) -> str | None:
    """Reason why `module` cannot become a scan, with what to change; None if it can."""
    kind = type(module)
    if isinstance(module, ScanRecurrent):
        return (
            f"already {kind.__name__}(solver={module.solver!r}); to change that, set its .solver or convert_back first"
        )
    if isinstance(module, nn.RNNCellBase):
        return f"{kind.__name__} is called once a step by other code; use torch.nn.{kind.__name__.removesuffix('Cell')}"
    if not isinstance(module, nn.RNNBase):
        return "it is compiled by torch.jit; convert before scripting"
    if kind not in SCANS:
        return _of_another_class(module)
    if "forward" in vars(module):
        return "its forward was replaced on the instance (offloading hooks do that); convert before"
    if module.proj_size:
        return f"proj_size={module.proj_size}: there is no scan over projected states; set proj_size=0"
    if getattr(module, "qconfig", None) is not None:
        return "it has a quantization config, and torch finds what to quantize by class; convert_back before quantizing"
    return None


def _of_another_class(module: nn.Module) -> str:
    kind = type(module)
    if parametrize.is_parametrized(module):
        return "it has parametrizations; convert first, then register them"
    if kind.__name__.startswith("FSDP"):
        return "fully_shard has changed its class; convert first, then shard"
    base = next((plain.__name__ for plain in SCANS if isinstance(module, plain)), "RNNBase")
    advice = f"derive it from Scan{base}" if base != "RNNBase" else "write it on ScanRNN, ScanGRU or ScanLSTM"
    return f"{kind.__name__} is a subclass of torch.nn.{base} whose own code may need that class; {advice}"
