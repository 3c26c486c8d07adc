"""ScanRNN, ScanGRU and ScanLSTM: torch.nn's constructors in front of `ScanRecurrent`."""

from typing import Annotated, Any

from torch import nn

from retime.foundations.arguments import AtLeast, AtMost, checked
from retime.mechanisms.scan import Solver
from retime.modules.recurrent import ScanRecurrent

Size = Annotated[int, AtLeast(1)]
Share = Annotated[float, AtLeast(0), AtMost(1)]
MODES = {"tanh": "RNN_TANH", "relu": "RNN_RELU"}


class ScanRNN(ScanRecurrent, nn.RNN):
    """`torch.nn.RNN` (Elman, tanh or ReLU) whose backward pass through time is a parallel scan (Wang et al. 2020).

    Takes torch.nn.RNN's arguments, inputs and state_dict. Its own argument:

    Args:
        solver: how gradients go back through time: "auto" (the cheapest by a cost model), "chunk", "blelloch" (the
            paper's Algorithm 1), "sequential", "truncated(<levels>)" or, on CUDA, "triton" (H <= 64).

    Raises:
        ValueError: an unknown solver or nonlinearity, a `proj_size`, a dropout outside [0, 1].
    """

    @checked
    def __init__(
        self,
        input_size: Size,
        hidden_size: Size,
        num_layers: Size = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: Share = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        solver: str | Solver = "auto",
        proj_size: int | None = None,
    ) -> None:
        refuse_projection(proj_size)
        if nonlinearity not in MODES:
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(MODES[nonlinearity], *sizes, device=device, dtype=dtype, solver=solver)
        self.nonlinearity = nonlinearity


class ScanGRU(ScanRecurrent, nn.GRU):
    """`torch.nn.GRU` whose backward pass through time is a parallel scan (Wang et al. 2020, section 4.2, appendix E).

    Takes torch.nn.GRU's arguments, inputs and state_dict. Its own argument:

    Args:
        solver: how gradients go back through time: "auto" (the cheapest by a cost model), "chunk", "blelloch" (the
            paper's Algorithm 1), "sequential", "truncated(<levels>)" or, on CUDA, "triton" (H <= 64).

    Raises:
        ValueError: an unknown solver, a `proj_size`, a dropout outside [0, 1].
    """

    @checked
    def __init__(
        self,
        input_size: Size,
        hidden_size: Size,
        num_layers: Size = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: Share = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        solver: str | Solver = "auto",
        proj_size: int | None = None,
    ) -> None:
        refuse_projection(proj_size)
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__("GRU", *sizes, device=device, dtype=dtype, solver=solver)


class ScanLSTM(ScanRecurrent, nn.LSTM):
    """`torch.nn.LSTM` whose backward pass through time is a parallel scan over the pair (h, c), 2 H numbers a step.

    Takes torch.nn.LSTM's arguments, inputs and state_dict, without projections. Its own argument:

    Args:
        solver: how gradients go back through time: "auto" (the cheapest by a cost model), "chunk", "blelloch" (the
            paper's Algorithm 1), "sequential" or "truncated(<levels>)".

    Raises:
        ValueError: an unknown solver, a `proj_size` other than 0, a dropout outside [0, 1].
    """

    @checked
    def __init__(
        self,
        input_size: Size,
        hidden_size: Size,
        num_layers: Size = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: Share = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        *,
        solver: str | Solver = "auto",
    ) -> None:
        if proj_size:
            raise ValueError(
                f"ScanLSTM(proj_size={proj_size}): there is no scan over projected states; use torch.nn.LSTM"
            )
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__("LSTM", *sizes, device=device, dtype=dtype, solver=solver)


def refuse_projection(proj_size: int | None) -> None:
    """torch.nn's own refusal, which it makes for any value."""
    if proj_size is not None:
        raise ValueError(f"proj_size={proj_size}: the proj_size argument is only supported for LSTM, not RNN or GRU")
