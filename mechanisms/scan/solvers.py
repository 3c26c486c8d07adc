"""Solvers: their names, what one is, and which one a layer uses."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.scan.cells import BlockJacobians, LocalJacobians, fold
from retime.mechanisms.scan.triton_launch import has_triton, scan_chunks, why_not

# The paper's scan (Algorithm 1) over affine maps, whole or cut off after some levels (section 5.3).


class Blelloch:
    """Theta(log T) dependent steps over dense Jacobians: ``T * B * S * S`` numbers of memory.

    Element ``s`` is the map ``v -> v J[T-1-s] + g[T-2-s]``. Up-sweep: neighbours are composed, level by level.
    Down-sweep: what reaches a pair reaches its left half as it is, and its right half through the left one: the
    reversed operands of line 13.

    Args:
        levels: levels of the up-sweep before a linear scan takes over. None: all of them.
    """

    safe = False

    @checked
    def __init__(self, levels: Annotated[int, AtLeast(1)] | None = None) -> None:
        self.levels = levels

    def __repr__(self) -> str:
        return "blelloch" if self.levels is None else f"truncated({self.levels})"

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        maps = jacobians.dense()[1:].flip(0)
        offsets = gradient[:-1].flip(0)
        levels = [(maps, offsets)]
        while maps.shape[0] > 1 and (self.levels is None or len(levels) <= self.levels):
            pairs = maps.shape[0] // 2
            left, right = maps[: 2 * pairs : 2], maps[1 : 2 * pairs : 2]
            composed = left @ right
            offset = apply(right, offsets[: 2 * pairs : 2], offsets[1 : 2 * pairs : 2])
            unpaired = 2 * pairs
            maps, offsets = torch.cat([composed, maps[unpaired:]]), torch.cat([offset, offsets[unpaired:]])
            levels.append((maps, offsets))
        reaching = _linear(maps, offsets, gradient[-1])
        for maps, offsets in reversed(levels[:-1]):
            pairs = maps.shape[0] // 2
            below = torch.empty_like(offsets)
            below[::2] = reaching
            below[1::2] = apply(maps[: 2 * pairs : 2], reaching[:pairs], offsets[: 2 * pairs : 2])
            reaching = below
        last = apply(maps[-1:], reaching[-1:], offsets[-1:]) if len(maps) else gradient[-1:]
        v = torch.cat([reaching, last]).flip(0) if len(maps) else last
        return v, jacobians.step_mv(0, v[0])


def apply(maps: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """``v J + g`` for every element: ``[n, B, S, S]``, ``[n, B, S]``, ``[n, B, S]``."""
    return (v.unsqueeze(-2) @ maps).squeeze(-2) + offsets


def _linear(maps: Tensor, offsets: Tensor, first: Tensor) -> Tensor:
    """Compute what reaches each element, one after another: ``[n, B, S]``."""
    if maps.shape[0] == 0:
        return offsets
    reaching = [first]
    for s in range(1, maps.shape[0]):
        reaching.append(apply(maps[s - 1], reaching[-1], offsets[s - 1]))
    return torch.stack(reaching)


# Two levels: the products of all chunks side by side, then one vector a chunk, then all steps side by side.

CACHE_BYTES = 512 * 1024
"""On a CPU so many bytes of products are formed at once: half of a server core's second-level cache, with room for what
each step multiplies."""
LEAST_AT_ONCE = 4
"""Chunks side by side, however large their products are: with fewer, the steps would hardly be shared."""


class Chunk:
    """About ``2 C + T / C`` dependent steps, matrix-free.

    Only the products of ``C`` neighbouring Jacobians are formed, and the gradient then passes the chunks as a vector:
    what can overflow is at most a chunk's own product, however long the sequence is.

    On a CPU long sequences are worked through in windows of as many chunks as the cache holds, the last window first.
    There the steps of a window run side by side no more than one core can use anyway.

    Args:
        length: ``C``, time steps a chunk. None: near ``sqrt(T / 3)``, where a pass makes the fewest calls.
    """

    safe = False

    @checked
    def __init__(self, length: Annotated[int, AtLeast(1)] | None = None) -> None:
        self.length = length

    def __repr__(self) -> str:
        return "chunk" if self.length is None else f"chunk({self.length})"

    def length_for(self, steps: int) -> int:
        """``C`` for that many time steps."""
        return min(steps, self.length or _fewest_calls(steps))

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        length = self.length_for(jacobians.steps)
        chunks, rest = divmod(jacobians.steps, length)
        windows = -(-chunks // _at_once(jacobians, gradient))
        carry: Tensor | None = None
        stop = jacobians.steps
        solved = []
        for k in range(windows):
            steps = length * ((chunks + k) // windows)
            stop -= steps
            v, carry = _solve_window(jacobians.narrow(stop, steps), gradient[stop : stop + steps], length, carry)
            solved.append(v)
        v = (solved[0] if windows == 1 else torch.cat(solved[::-1])).flatten(0, 1)
        assert carry is not None  # there is a window or more
        if rest == 0:
            return v, carry
        first, carry = jacobians.narrow(0, rest).sweep(gradient[:rest], carry)
        return torch.cat([first, v]), carry


def _solve_window(
    jacobians: LocalJacobians, gradient: Tensor, length: int, entry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``v`` as ``[T / C, C, B, S]``, and what leaves the first step: ``[B, S]``."""
    chunks = jacobians.folded(length)
    within = fold(gradient, length).contiguous()
    entries, carry = pass_chunks(chunks.products(within), entry)
    return chunks.sweep(within, entries)[0].transpose(0, 1), carry


def pass_chunks(maps: Tensor, entry: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient as a vector through every chunk, the last chunk first.

    Args:
        maps: ``[N, B, S + 1, S]`` from :meth:`LocalJacobians.products`.
        entry: what enters the last chunk: ``[B, S]``. None: nothing.

    Returns:
        What enters each chunk: ``[N, B, S]``, and what leaves the first one: ``[B, S]``.
    """
    matrices, sent = maps[:, :, :-1, :].unbind(0), maps[:, :, -1:, :].unbind(0)
    carry = torch.zeros_like(sent[0]) if entry is None else entry.unsqueeze(-2)
    entries = [carry]
    for k in range(len(matrices) - 1, -1, -1):
        carry = torch.baddbmm(sent[k], carry, matrices[k])
        entries.append(carry)
    return torch.stack(entries[-2::-1]).squeeze(-2), carry.squeeze(-2)


def _at_once(jacobians: LocalJacobians, gradient: Tensor) -> int:
    """Number of chunks that make a window."""
    if gradient.device.type != "cpu":
        return jacobians.steps
    one = math.prod(jacobians.batch) * jacobians.state * (jacobians.state + 1) * gradient.element_size()
    return max(LEAST_AT_ONCE, CACHE_BYTES // one)


@cache
def _fewest_calls(steps: int) -> int:
    """The chunk's length with which a pass makes the fewest calls: 3 a step of a chunk for its product and 2 for its
    vectors, 1 (of one and a half's cost) a chunk, 2 a step that is left over."""
    centre = math.sqrt(0.3 * steps)
    lengths = range(max(1, int(centre / 2)), int(2 * centre) + 2)
    return min(lengths, key=lambda length: 5 * length + 1.5 * (steps // length) + 2 * (steps % length))


# One step after another: back-propagation through time without an autograd node a step.


class Sequential:
    """Theta(T) dependent matrix-vector products; forms no number that autograd does not form."""

    safe = True

    def __repr__(self) -> str:
        return "sequential"

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return jacobians.sweep(gradient)


# The chunk solver in three Triton kernels, for narrow RNN and GRU layers on a GPU.


class TritonChunk:
    """The algorithm of :class:`Chunk` in three launches, where that one makes some a step of a chunk.

    Products are IEEE float32 or float64. When gradients of the result are asked for (double backward), :class:`Chunk`
    does the work. Tested in Triton's interpreter, not yet on a GPU: nothing is known about its speed there.

    Args:
        length: time steps a chunk. None: near ``sqrt(T / 2)``, where the dependent steps are fewest.
    """

    safe = False

    def __init__(self, length: int | None = None) -> None:
        self.chunk = Chunk(length)

    def __repr__(self) -> str:
        return "triton" if self.chunk.length is None else f"triton({self.chunk.length})"

    def check(self, mode: str, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse a layer that the kernels cannot run, before its forward pass.

        Raises:
            ValueError: with the reason of :func:`~retime.mechanisms.scan.triton_launch.why_not`.
        """
        reason = why_not(mode, hidden, dtype, device)
        if reason is not None:
            raise ValueError(f"solver={self!r} cannot run this layer: {reason}. Use solver='auto' or 'chunk'")

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return self.chunk.solve(jacobians, gradient)
        if not isinstance(jacobians, BlockJacobians):
            raise ValueError(f"solver={self!r} has kernels for RNN and GRU, not for {type(jacobians).__name__}")
        length = self.chunk.length_for(jacobians.steps)
        return scan_chunks(jacobians.scale, jacobians.matrix, gradient, length)


NAMES = "auto, sequential, chunk, chunk:<length>, blelloch, truncated:<levels>, triton, triton:<length>, autograd"


@runtime_checkable
class Solver(Protocol):
    """Solves ``v[t-1] = g[t-1] + J[t]^T v[t]`` for all ``t``."""

    @property
    def safe(self) -> bool:
        """Return whether every number it forms is one that autograd forms too."""
        ...

    def __repr__(self) -> str:
        """The name that :func:`parse_solver` reads."""
        ...

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Solve one scan.

        Args:
            gradient: ``g``, what reaches each state from outside the recurrence: ``[T, B, S]``.

        Returns:
            ``v``: ``[T, B, S]``, and ``J[0]^T v[0]``, the gradient of the first state: ``[B, S]``.
        """
        ...


def parse_solver(name: str) -> Solver:
    """The solver of that name. Solvers hold no state: one object a name serves all layers.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: use one of {NAMES}")
    return _parse(name)


@cache
def _parse(name: str) -> Solver:
    match = re.fullmatch(r"(\w+)(?:[:(](\d+)\)?)?", name.strip())
    kind, number = match.groups() if match else (name, None)
    count = None if number is None else int(number)
    if kind == "sequential" and count is None:
        return Sequential()
    if kind == "chunk":
        return Chunk(count)
    if kind == "triton":
        return TritonChunk(count)
    if kind == "blelloch" and count is None:
        return Blelloch()
    if kind == "truncated" and count is not None:
        return Blelloch(count)
    raise ValueError(f"unknown solver {name!r}; use one of {NAMES}")


def check_solver(solver: str | Solver) -> None:
    """Refuse what :func:`scan_layer` would refuse.

    Raises:
        ValueError: for an unknown name.
        ModuleNotFoundError: for ``"triton"`` where triton is not installed.
        TypeError: for an object without ``solve``.
    """
    if isinstance(solver, str):
        if solver not in ("auto", "autograd") and isinstance(parse_solver(solver), TritonChunk) and not has_triton():
            raise ModuleNotFoundError(
                f"solver={solver!r} needs triton, which is not installed: pip install 'lightning-retime[triton]', or "
                "use solver='auto' or 'chunk'"
            )
    elif not callable(getattr(solver, "solve", None)):
        raise TypeError(f"solver={solver!r} has no solve(jacobians, gradient); use one of {NAMES}")


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
    """Return whether "auto" leaves one layer on a CPU to torch's backward pass; cheap enough for every forward pass.

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
