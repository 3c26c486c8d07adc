"""Which solver a layer uses."""

from functools import lru_cache

import torch
from torch import Tensor

from retime.foundations.arguments import checked
from retime.mechanisms.scan import calibration
from retime.mechanisms.scan.cost_model import AUTOGRAD, CostModel, Shape
from retime.mechanisms.scan.solver import Solver, parse_solver
from retime.mechanisms.scan.triton_chunk import TritonChunk
from retime.mechanisms.scan.triton_launch import why_not

_models: dict[str, CostModel] = {"cpu": calibration.CPU, "cuda": calibration.CUDA}


@checked
def set_cost_model(device_type: str, model: CostModel) -> CostModel | None:
    """Let ``solver="auto"`` choose by ``model`` on that type of device, and give back the model it replaces."""
    before = _models.get(device_type)
    _models[device_type] = model
    _choose.cache_clear()
    return before


def choose_solver(
    solver: str | Solver, mode: str, x: Tensor, state: Tensor, batch_sizes: Tensor | None = None
) -> Solver | None:
    """The solver for one layer; None: torch's own backward pass. The same shapes get the same choice in every run.

    Args:
        x: ``[T, B, I]``, or packed ``[N, I]``.
        state: ``h0``: ``[D, B, H]``.

    Raises:
        ValueError: for ``"triton"`` where its kernels cannot run the layer.
    """
    hidden = state.shape[-1]
    if solver == "auto":
        steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
        cell, itemsize = _cell(mode, x, batch_sizes), max(4, x.element_size())
        kernels = x.is_cuda and why_not(mode, hidden, x.dtype, x.device) is None
        solver = _choose(x.device.type, cell, steps, batch_sizes is not None, x.shape, state.shape, itemsize, kernels)
    if solver == AUTOGRAD:
        return None
    made = parse_solver(solver) if isinstance(solver, str) else solver
    if isinstance(made, TritonChunk):
        made.check(mode, hidden, x.dtype, x.device)
    return made


def keeps_torchs_own(mode: str, x: torch.Size, hidden: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether "auto" leaves one layer on a CPU to torch's own backward pass; cheap enough to ask in every forward pass.

    Args:
        x: the shape ``[T, B, I]`` of the first layer's input.
        inputs: the input size of this layer.
    """
    shape, state = torch.Size((*x[:2], inputs)), torch.Size((1, x[1], hidden))
    return _choose("cpu", mode.partition("_")[0], x[0], False, shape, state, max(4, dtype.itemsize)) == AUTOGRAD


@lru_cache(maxsize=4096)
def _choose(
    device_type: str,
    cell: str,
    steps: int,
    packed: bool,
    x: torch.Size,
    state: torch.Size,
    itemsize: int,
    kernels: bool = False,
) -> str:
    """A layer asks in every forward pass: what was answered once is remembered."""
    model = _models.get(device_type)
    if model is None:
        return AUTOGRAD
    shape = Shape(steps, state[-2], state[-1], x[-1], itemsize)
    running = Shape(steps, x[0] / steps, state[-1], x[-1], itemsize) if packed else shape
    return model.choose(cell, shape, running, kernels)


def _cell(mode: str, x: Tensor, batch_sizes: Tensor | None) -> str:
    if mode != "LSTM":
        return mode.partition("_")[0]
    fused = x.device.type == "cpu" and batch_sizes is None and x.dtype != torch.float64 and _onednn()
    return "LSTM fused" if fused else "LSTM"


def _onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]
