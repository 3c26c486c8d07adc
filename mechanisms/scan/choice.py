"""Which solver a layer uses."""

import torch
from torch import Tensor

from retime.mechanisms.scan import calibration
from retime.mechanisms.scan.cost_model import AUTOGRAD, CostModel, Shape
from retime.mechanisms.scan.solver import Solver, parse_solver

_models: dict[str, CostModel] = {"cpu": calibration.CPU, "cuda": calibration.CUDA}
_parsed: dict[str, Solver] = {}


def set_cost_model(device_type: str, model: CostModel) -> CostModel | None:
    """Let ``solver="auto"`` choose by ``model`` on that type of device, and give back the model it replaces."""
    before = _models.get(device_type)
    _models[device_type] = model
    return before


def choose_solver(
    solver: str | Solver, mode: str, x: Tensor, state: Tensor, batch_sizes: Tensor | None = None
) -> Solver | None:
    """The solver for one layer; None: torch's own backward pass. The same shapes get the same choice in every run.

    :param x: ``[T, B, I]``, or packed ``[N, I]``.
    :param state: ``h0``: ``[D, B, H]``.
    """
    if not isinstance(solver, str):
        return solver
    if solver == "auto":
        solver = _choose(mode, x, state, batch_sizes)
    if solver == AUTOGRAD:
        return None
    if solver not in _parsed:
        _parsed[solver] = parse_solver(solver)
    return _parsed[solver]


def _choose(mode: str, x: Tensor, state: Tensor, batch_sizes: Tensor | None) -> str:
    model = _models.get(x.device.type)
    if model is None:
        return AUTOGRAD
    steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    batch, hidden = state.shape[-2:]
    itemsize = max(4, x.element_size())
    padded = Shape(steps, batch, hidden, x.shape[-1], itemsize)
    running = padded if batch_sizes is None else Shape(steps, x.shape[0] / steps, hidden, x.shape[-1], itemsize)
    return model.choose(_cell(mode, x, batch_sizes), padded, running)


def _cell(mode: str, x: Tensor, batch_sizes: Tensor | None) -> str:
    if mode != "LSTM":
        return mode.partition("_")[0]
    fused = x.device.type == "cpu" and batch_sizes is None and x.dtype != torch.float64 and _onednn()
    return "LSTM fused" if fused else "LSTM"


def _onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]
