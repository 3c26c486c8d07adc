"""What users do by hand for memory in plain torch: a batch in parts, blocks checkpointed, saved tensors on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isqrt

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

PARTS, CHECKPOINT, SAVE_ON_CPU = "parts", "checkpoint", "save_on_cpu"
PEERS = (PARTS, CHECKPOINT, SAVE_ON_CPU)
_COUNTS = (2, 4, 8, 16, 32)


def part_sizes(samples: int) -> set[int]:
    """Samples at once, of a batch of so many in 2 to 32 equal parts."""
    return {samples // count for count in _COUNTS if samples >= count}


def prepared(model: nn.Module, peer: str | None) -> nn.Module:
    """The model with its blocks checkpointed, if that is the peer."""
    return checkpointed(model) if peer == CHECKPOINT else model


def saving(peer: str | None) -> AbstractContextManager[object]:
    """Around the forward pass. On a processor `save_on_cpu` finds that the tensors are there, and does nothing."""
    return save_on_cpu() if peer == SAVE_ON_CPU else nullcontext()


def checkpointed(model: nn.Module) -> nn.Module:
    """Have each block compute its forward pass again in the backward pass (Chen et al. 2016, `torch.utils.checkpoint`).

    Blocks are the members of lists of one class; a chain without any is cut into as many parts as each has layers.

    Raises:
        ValueError: neither.
    """
    blocks = list(_blocks(model))
    if not blocks and isinstance(model, nn.Sequential):
        size = isqrt(len(model))
        model = nn.Sequential(*(model[first : first + size] for first in range(0, len(model), size)))
        blocks = list(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks to checkpoint: leave {CHECKPOINT} out of peers")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and len({*map(type, child)}) == 1:
            yield from child
        else:
            yield from _blocks(child)
