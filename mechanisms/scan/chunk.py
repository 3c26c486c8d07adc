"""Two levels: the products of all chunks side by side, then one vector a chunk, then all steps side by side."""

import math

import torch
from torch import Tensor

from retime.mechanisms.scan.jacobians import LocalJacobians, fold, unfold


class Chunk:
    """About ``2 C + T / C`` dependent steps, matrix-free: the only products formed span one chunk.

    Only the products of ``C`` neighbouring Jacobians are formed, and the gradient then passes the chunks as a vector:
    what overflows is at most a chunk's own product, however long the sequence is.

    :param length: ``C``, time steps a chunk. None: near ``sqrt(T / 2)``, where the dependent steps are fewest.
    """

    name = "chunk"
    safe = False

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        length = self.length or max(1, round(math.sqrt(jacobians.steps / 2)))
        length = min(length, jacobians.steps)
        rest = jacobians.steps % length
        chunks = jacobians.narrow(rest, jacobians.steps - rest).folded(length)
        within = fold(gradient[rest:], length)
        entries, carry = _pass_chunks(_products(chunks, within))
        v, _ = chunks.sweep(within, entries)
        v = unfold(v)
        if rest == 0:
            return v, carry
        first, carry = jacobians.narrow(0, rest).sweep(gradient[:rest], carry)
        return torch.cat([first, v]), carry


def _products(chunks: LocalJacobians, gradient: Tensor) -> Tensor:
    """Every chunk's affine map: ``[N, B, S + 1, S]``, the last row what the chunk's own gradients send on."""
    eye = torch.eye(chunks.state, dtype=gradient.dtype, device=gradient.device)
    rows = torch.cat(
        [eye.expand(*chunks.batch, -1, -1), torch.zeros_like(gradient[0]).unsqueeze(-2)], dim=-2
    ).contiguous()
    for t in range(chunks.steps - 1, -1, -1):
        rows[..., -1, :] += gradient[t]
        rows = chunks.step_mm(t, rows)
    return rows


def _pass_chunks(maps: Tensor) -> tuple[Tensor, Tensor]:
    """What enters each chunk from the later ones ``[N, B, S]``, and what leaves the first one ``[B, S]``."""
    entries = torch.empty_like(maps[..., -1, :])
    carry = torch.zeros_like(maps[0, :, -1, :])
    for k in range(maps.shape[0] - 1, -1, -1):
        entries[k] = carry
        carry = torch.baddbmm(maps[k, :, -1:, :], carry.unsqueeze(1), maps[k, :, :-1, :]).squeeze(1)
    return entries, carry
