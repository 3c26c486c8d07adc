"""The chunk solver in three Triton kernels, for narrow RNN and GRU layers on a GPU."""

import torch
from torch import Tensor

from retime.mechanisms.scan.blocks import BlockJacobians
from retime.mechanisms.scan.chunk import Chunk
from retime.mechanisms.scan.local_jacobians import LocalJacobians
from retime.mechanisms.scan.triton_launch import scan_chunks, why_not


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
