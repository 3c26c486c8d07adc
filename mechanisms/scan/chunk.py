"""Two levels: the products of all chunks side by side, then one vector a chunk, then all steps side by side."""

import math
from functools import cache
from typing import Annotated

import torch
from torch import Tensor

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.scan.local_jacobians import LocalJacobians, fold

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
    """How many chunks make a window."""
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
