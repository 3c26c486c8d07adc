"""Two levels: the products of all chunks side by side, then one vector a chunk, then all steps side by side."""

import math

import torch
from torch import Tensor

from retime.mechanisms.scan.jacobians import LocalJacobians, fold, unfold


class Chunk:
    """About ``2 C + T / C`` dependent steps, matrix-free.

    Only the products of ``C`` neighbouring Jacobians are formed, and the gradient then passes the chunks as a vector:
    what can overflow is at most a chunk's own product, however long the sequence is.

    :param length: ``C``, time steps a chunk. None: near ``sqrt(T / 2)``, where the dependent steps are fewest.
    """

    safe = False

    def __init__(self, length: int | None = None) -> None:
        if length is not None and length < 1:
            raise ValueError(f"length={length}: a chunk needs 1 time step or more")
        self.length = length

    def __repr__(self) -> str:
        return "chunk" if self.length is None else f"chunk({self.length})"

    def length_for(self, steps: int) -> int:
        """``C`` for that many time steps."""
        return min(steps, self.length or max(1, round(math.sqrt(steps / 2))))

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        length = self.length_for(jacobians.steps)
        rest = jacobians.steps % length
        chunks = jacobians.narrow(rest, jacobians.steps - rest).folded(length)
        within = fold(gradient[rest:], length).contiguous()
        entries, carry = pass_chunks(chunks.products(within))
        v = unfold(chunks.sweep(within, entries)[0])
        if rest == 0:
            return v, carry
        first, carry = jacobians.narrow(0, rest).sweep(gradient[:rest], carry)
        return torch.cat([first, v]), carry


def pass_chunks(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient as a vector through every chunk, the last chunk first.

    :param maps: ``[N, B, S + 1, S]`` from :meth:`LocalJacobians.products`.
    :return: what enters each chunk: ``[N, B, S]``, and what leaves the first one: ``[B, S]``.
    """
    matrices, sent = maps[:, :, :-1, :].unbind(0), maps[:, :, -1:, :].unbind(0)
    carry = torch.zeros_like(sent[0])
    entries = [carry]
    for k in range(len(matrices) - 1, -1, -1):
        carry = torch.baddbmm(sent[k], carry, matrices[k])
        entries.append(carry)
    return torch.stack(entries[-2::-1]).squeeze(-2), carry.squeeze(-2)
