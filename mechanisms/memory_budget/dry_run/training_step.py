"""One training step as data: what a dry run needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.byte_sizes import parse_bytes
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import tree_map
from retime.mechanisms.memory_budget.dry_run.gradients import Buckets, Gradients, check_held


def take(batch: Any, first: int, last: int) -> Any:
    """Samples ``first`` to ``last - 1`` of every tensor in ``batch``, along dimension 0; scalars stay as they are."""

    def part(leaf: Any) -> Any:
        return leaf[first:last] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return tree_map(part, batch)


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step, as far as memory is concerned.

    Args:
        module: all parameters and buffers that ``loss`` uses.
        batch: a whole batch, any nesting that torch's pytrees know. Fake or meta tensors will do.
        samples: how many samples it has.
        loss: runs the forward pass on a batch or a part of it and returns the scalar to differentiate, or a mapping or
            object with it as ``loss``: all of that is held to the step's end, as training does. It reads parameters
            from ``module`` at each call.
        optimizers: run at the end, each once.
        split: takes a part out of a batch.
        gradients: what the gradients of the step before do. ``"freed"``: they are gone when the step begins;
            ``"freed after forward"``: gone after the first forward pass, as under Lightning's automatic optimization;
            ``"kept"``: they are zeroed in place, or were accumulated before. Those of parameters that none of the
            optimizers has are kept at all times, for nobody frees them.
        buckets: memory of the size of all gradients that DistributedDataParallel holds from the start. ``"beside"``
            them; or ``"gradients"``: it is theirs (``gradient_as_bucket_view``), but for those of sub-batches, which
            are apart until the last one.
        reduction_bytes: that reducing them takes, at whatever time.
        whole: samples of the batch that this one is a part of; 0: it is no part.
        beside: what a backward pass may give gradients to beside ``module``, to be filled in: what optimizers update.
    """

    module: nn.Module
    batch: Any
    samples: int
    loss: Callable[[Any], Any]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    split: Callable[[Any, int, int], Any] = take
    gradients: Gradients = "freed"
    buckets: Buckets = ""
    reduction_bytes: int = 0
    whole: int = 0
    beside: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        """Parts of the step have neither these optimizers nor, where it is a part of the batch, this batch."""
        check_held(self.gradients, self.buckets)
        object.__setattr__(self, "reduction_bytes", parse_bytes("reduction_bytes", self.reduction_bytes, least=0))
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        leaves = [tensor for tensor in tensors_in([groups, self.batch]) if tensor.is_leaf and tensor.requires_grad]
        known = {id(tensor) for tensor in self.beside}
        more = tuple(tensor for tensor in leaves if id(tensor) not in known)
        object.__setattr__(self, "beside", self.beside + more)

    def of_size(self, samples: int) -> TrainingStep:
        """The same step on the first ``samples`` of the batch, and on nothing else."""
        whole = self.whole or self.samples
        return replace(self, batch=self.split(self.batch, 0, samples), samples=samples, whole=whole)

    def given(self) -> list[Tensor]:
        """What is there before the step: parameters, buffers and the batch."""
        return [*self.module.parameters(), *self.module.buffers(), *tensors_in(self.batch)]
