"""How long each way through a layer's backward pass takes: what ``solver="auto"`` chooses by."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from retime.mechanisms.scan.chunk import Chunk

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
        if way == "chunk":
            length = Chunk().length_for(self.steps)
            calls = 2 * length + self.steps // length + self.steps % length
            return 1.0, calls, *common, rows * square * width, rows * square * self.hidden * width
        if way == TRITON:
            length = Chunk().length_for(self.steps)
            turns = 2 * length + -(-self.steps // length)
            return 1.0, turns, *common, rows * square * width, rows * square * self.hidden * width
        return 1.0, math.log2(self.steps + 1), *common, rows * square * width, rows * square * self.hidden * width


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
        known = self.coefficients.get(f"{cell} {way}")
        return math.inf if known is None else sum(a * b for a, b in zip(known, shape.work(way), strict=True))

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
