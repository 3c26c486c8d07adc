"""Which solver a layer uses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from retime.foundations.arguments import checked
from retime.mechanisms.scan.solvers import Chunk, Solver, TritonChunk, parse_solver
from retime.mechanisms.scan.triton_launch import why_not

# How long each way through a layer's backward pass takes: what ``solver="auto"`` chooses by.

AUTOGRAD = "autograd"
WAYS = (AUTOGRAD, "sequential", "chunk", "blelloch")
TRITON = "triton"
"""A way too, where its kernels run: it is chosen only by coefficients that ``calibrate("cuda")`` has measured."""
CELLS = ("RNN", "GRU", "LSTM", "LSTM fused")
MARGIN = 1.25
"""A scan is used where it is predicted to be this much faster than torch's own backward pass, so that an error of the
prediction does not cost time."""


@dataclass(frozen=True)
class Shape:
    """One layer and direction: ``T`` steps, ``B`` sequences, ``H`` hidden and ``I`` input size, bytes a number."""

    steps: int
    batch: float
    hidden: int
    inputs: int
    itemsize: int = 4

    def work(self, way: str) -> tuple[float, ...]:
        """Amounts of work that a way's coefficients multiply: calls first, then numbers moved, then multiplications."""
        rows, square, width = self.steps * self.batch, self.hidden**2, self.itemsize / 4
        common = rows * self.hidden * width, rows * self.hidden * (self.hidden + self.inputs) * width
        if way == AUTOGRAD:
            return 1.0, self.steps, self.steps * square * width, *common
        if way == "sequential":
            return 1.0, self.steps, *common
        length = Chunk().length_for(self.steps)
        calls = {
            "chunk": 2 * length + self.steps // length + self.steps % length,
            TRITON: 2 * length + -(-self.steps // length),
            "blelloch": math.log2(self.steps + 1),
        }
        return 1.0, calls[way], *common, rows * square * width, rows * square * self.hidden * width


@dataclass(frozen=True)
class CostModel:
    """Predicts the time that training adds to a forward pass without gradients.

    Args:
        coefficients: microseconds a unit of :meth:`Shape.work`, by ``"<cell> <way>"``. A way without coefficients is
            never chosen. Cells: ``RNN``, ``GRU``, ``LSTM``, and ``LSTM fused`` where one kernel of torch runs all
            steps.
    """

    coefficients: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        amounts = {f"{cell} {way}": len(Shape(1, 1, 1, 1).work(way)) for cell in CELLS for way in (*WAYS, TRITON)}
        for name, given in self.coefficients.items():
            if len(given) != amounts.get(name) or not all(number >= 0 and math.isfinite(number) for number in given):
                raise ValueError(
                    f"coefficients[{name!r}]={given}: give {amounts.get(name, 'no')} numbers of 0 or more; names are "
                    f"'<cell> <way>' of {', '.join(CELLS)} and {', '.join((*WAYS, TRITON))}"
                )

    def predict_us(self, cell: str, way: str, shape: Shape) -> float:
        """Microseconds; infinite where the way is not known."""
        coefficients = self.coefficients.get(f"{cell} {way}")
        return (
            math.inf if coefficients is None else sum(a * b for a, b in zip(coefficients, shape.work(way), strict=True))
        )

    def choose(self, cell: str, shape: Shape, running: Shape | None = None, kernels: bool = False) -> str:
        """The way with the least predicted time; torch's own unless another is clearly faster.

        Args:
            shape: what a scan works on; sequences of different lengths are padded.
            running: what torch's own pass works on, where it is less: the mean batch of packed sequences.
            kernels: whether the Triton kernels run this layer.
        """
        ways = (*WAYS[1:], TRITON) if kernels else WAYS[1:]
        times = {way: self.predict_us(cell, way, shape) for way in ways}
        best = min(times, key=lambda way: times[way])
        return best if times[best] * MARGIN < self.predict_us(cell, AUTOGRAD, running or shape) else AUTOGRAD


# Coefficients of the cost model that ship with the package, by type of device.

CPU = CostModel(
    {
        "RNN autograd": (57.4, 23.0, 0.000129, 0.00395, 3.95e-05),
        "RNN sequential": (317.0, 6.49, 0.00531, 4.61e-05),
        "RNN chunk": (527.0, 6.16, 0.0229, 0.0, 0.0, 2.5e-05),
        "RNN blelloch": (154.0, 126.0, 0.0, 0.0016, 0.00276, 0.0),
        "GRU autograd": (0.0, 79.4, 0.000761, 0.0128, 0.000127),
        "GRU sequential": (494.0, 6.64, 0.0283, 0.000215),
        "GRU chunk": (459.0, 12.2, 0.103, 0.0, 0.0, 0.000108),
        "GRU blelloch": (181.0, 146.0, 0.0686, 0.0, 0.00217, 7.49e-06),
        "LSTM autograd": (0.0, 72.2, 0.000642, 0.0231, 9.19e-05),
        "LSTM sequential": (529.0, 30.1, 0.0523, 0.000154),
        "LSTM chunk": (470.0, 25.5, 0.0, 0.0, 0.0196, 7.49e-05),
    }
)
"""Fitted to one core of a server (AVX-512, torch 2.13) over T 10 to 3000, B 1 to 256, H 8 to 256."""

CUDA = CostModel(
    {
        f"{cell} {way}": coefficients
        for cell in ("RNN", "GRU", "LSTM")
        for way, coefficients in {
            "autograd": (60.0, 2.5, 0.0, 1e-6, 1e-7),
            "chunk": (150.0, 12.0, 1e-6, 1e-7, 3e-6, 4e-7),
            "blelloch": (150.0, 60.0, 1e-6, 1e-7, 1e-5, 8e-7),
        }.items()
    }
)
"""Estimates, not measurements: 2.5 microseconds a step in cuDNN, 5 a launch. ``calibrate("cuda")`` measures, and alone
gives the coefficients with which "auto" may choose the Triton kernels."""


_models: dict[str, CostModel] = {"cpu": CPU, "cuda": CUDA}


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
    chosen = parse_solver(solver) if isinstance(solver, str) else solver
    if isinstance(chosen, TritonChunk):
        chosen.check(mode, hidden, x.dtype, x.device)
    return chosen


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
