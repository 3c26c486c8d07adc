"""The GRU cell of torch.nn, with the derivatives of the paper's Appendix E."""

import torch
from torch import Tensor
from torch.nn import functional as F

from retime.mechanisms.scan.blocks import BlockJacobians
from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights


class LocalGRU(LocalCell):
    """Gates are recomputed for all steps at once, in one product each for the input and the hidden state.

    ``J[t] = J11 + J1 (j2 j3 j6 j7) + J8 (j9 j10) + J4 (j5 j6 j7)``: the direct term first, then gates r, z, n.

    :param x: ``[T, B, I]``.
    :param before: ``h[t-1]``: ``[T, B, H]``.
    :param mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    def __init__(self, x: Tensor, before: Tensor, weights: Weights, mask: Tensor | None = None) -> None:
        hidden = before.shape[-1]
        from_input = F.linear(x, weights.input, weights.input_bias)
        from_hidden = F.linear(before, weights.hidden, weights.hidden_bias)
        reset, update = torch.sigmoid(from_input[..., : 2 * hidden] + from_hidden[..., : 2 * hidden]).chunk(2, -1)
        candidate_hidden = from_hidden[..., 2 * hidden :]
        candidate = torch.tanh(torch.addcmul(from_input[..., 2 * hidden :], reset, candidate_hidden))
        if mask is not None:
            update = update * mask
        j6_j7 = (1 - update) * (1 - candidate * candidate)
        if mask is not None:
            j6_j7 = j6_j7 * mask
        j10 = before - candidate
        self.candidate = j6_j7
        self.jacobians = BlockJacobians(
            torch.stack(
                [
                    update,
                    j6_j7 * candidate_hidden * (reset * (1 - reset)),
                    j10 * (update * (1 - update)),
                    j6_j7 * reset,
                ],
                dim=-2,
            ),
            torch.cat([torch.eye(hidden, dtype=x.dtype, device=x.device), weights.hidden]),
        )

    def gate_gradients(self, v: Tensor) -> GateGradients:
        hidden = self.jacobians.scale[..., 1:, :] * v.unsqueeze(-2)
        inputs = torch.cat([hidden[..., :2, :].flatten(-2), self.candidate * v], dim=-1)
        return GateGradients(inputs, hidden.flatten(-2))
