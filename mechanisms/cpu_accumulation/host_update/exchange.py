"""What the ranks of a machine tell each other through the memory that they share; all of them call this alike."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.cpu_accumulation.shared_memory import SharedSum

__all__ = ["SENT_ALONE_BYTES", "broadcast", "exchanged", "numbers_of_all", "shown"]

SENT_ALONE_BYTES = 2**16
"""Tensors from this size on are sent as they lie; smaller ones together, as each turn waits for the other ranks."""


def broadcast(tensors: Sequence[Tensor], root: int, ranks: SharedSum) -> None:
    """Replace tensors of floating-point numbers by those of one rank, bit by bit."""
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.nbytes >= SENT_ALONE_BYTES:
            ranks.broadcast(tensor.view(-1), root)
            if ranks.rank != root:
                torch.autograd.graph.increment_version(tensor)
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for few in together.values():
        flat = torch.cat([one.reshape(-1) for one in few])
        ranks.broadcast(flat, root)
        if ranks.rank != root:
            for one, values in zip(few, torch.split(flat, [one.numel() for one in few]), strict=True):
                one.copy_(values.view(one.shape))


def numbers_of_all(mine: Sequence[float], ranks: SharedSum) -> list[list[float]]:
    """Each rank's numbers, the same count on all."""
    table = torch.zeros(ranks.ranks, len(mine), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(mine, dtype=torch.float64)
    ranks.add(table.view(-1))
    return table.tolist()


def shown(mine: Any, root: int, ranks: SharedSum) -> Any:
    """What one rank shows all, which can be pickled."""
    data = bytearray(pickle.dumps(mine)) if ranks.rank == root else bytearray()
    size = torch.tensor([len(data)], dtype=torch.float64)
    ranks.broadcast(size, root)
    data.extend(bytes(-int(size) % 4 + int(size) - len(data)))
    ranks.broadcast(torch.frombuffer(data, dtype=torch.float32), root)
    return mine if ranks.rank == root else pickle.loads(data)


def exchanged(mine: Any, ranks: SharedSum) -> list[Any]:
    """What each rank shows all."""
    return [shown(mine, root, ranks) for root in range(ranks.ranks)]
