"""Gradients of data parallel ranks, added up as soon as a stage has all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retime.mechanisms.pipeline.errors import messages_of_group

__all__ = ["GradientSums"]


class GradientSums:
    """Means of gradients over a group, on their way while other stages go on.

    Args:
        group: ranks that have the same stages; None: this one is alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._on_the_way: list[tuple[Any, Tensor, list[Tensor]]] = []

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Let the gradients of these leave; the same on all ranks. One that is not there counts as zeros."""
        if self._group is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for some in by_type.values():
            flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in some])
            flat /= dist.get_world_size(self._group)
            self._on_the_way.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, some))

    def end(self) -> None:
        """Wait for all, and put them where they belong."""
        while self._on_the_way:
            work, flat, parameters = self._on_the_way.pop(0)
            with messages_of_group(self._group):
                work.wait()
            for parameter, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
                mean = piece.view_as(parameter)
                parameter.grad = mean.clone() if parameter.grad is None else parameter.grad.copy_(mean)

    def forget(self) -> None:
        """After a failure."""
        self._on_the_way.clear()
