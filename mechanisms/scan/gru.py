"""The GRU cell of torch.nn, with the derivatives of the paper's Appendix E."""

import torch
from torch import Tensor

from retime.mechanisms.scan.blocks import BlockJacobians
from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights, gate_products


class LocalGRU(LocalCell):
    """Gates are recomputed for all steps at once, in one batched product each for the input and the hidden state.

    ``J[t] = J11 + J1 (j2 j3 j6 j7) + J8 (j9 j10) + J4 (j5 j6 j7)``: the direct term first, then gates r, z, n.

    Args:
        x: ``[T, B, I]``.
        before: ``h[t-1]``: ``[T, B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    jacobians: BlockJacobians

    def __init__(self, x: Tensor, before: Tensor, weights: Weights, mask: Tensor | None = None) -> None:
        input_r, input_z, input_n = gate_products(x, weights.input, weights.input_bias, gates=3)
        hidden_r, hidden_z, m = gate_products(before, weights.hidden, weights.hidden_bias, gates=3)
        r, z = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
        n = torch.tanh(torch.addcmul(input_n, r, m))
        j2, j9 = r * (1 - r), z * (1 - z)
        j6_j7 = (1 - n * n) * (1 - z)
        j10 = before - n
        scale = torch.stack([z, j6_j7 * m * j2, j10 * j9, j6_j7 * r])  # blocks outermost: each is one run of memory
        if mask is not None:
            scale, j6_j7 = scale * mask, j6_j7 * mask
        eye = torch.eye(before.shape[-1], dtype=x.dtype, device=x.device)
        self._scale, self._candidate = scale, j6_j7
        self.jacobians = BlockJacobians(scale.movedim(0, -2), torch.cat([eye, weights.hidden]))

    def gate_gradients(self, v: Tensor) -> GateGradients:
        r, z, m = (self._scale[1:] * v).unbind(0)
        return GateGradients((r, z, self._candidate * v), (r, z, m))
