"""vDNN+ executed for real: vDNN's rule with sub-batches that fit a budget (moDNN, section 7.2, Figure 12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool import FreedMemory
from retime.foundations.parts import batch_statistics_layers
from retime.foundations.storages import tensors_in
from retime.mechanisms.memory_budget import HostTier, PlanChoice, StepMemory, TrainingStep, calibrate, part_sizes
from retime.recipes.modnn.vdnn import Vdnn
from retime.schedules.budget import BudgetError


class VdnnPlus(Vdnn):
    """Vdnn with the largest sub-batches that fit; tensors come from the pool that plans of this project use.

    Args:
        model, loss, batch, host, rule: as for :class:`Vdnn`.
        optimizer: its states count.
        budget_bytes: for everything.

    Attributes:
        peak_bytes: predicted.

    Raises:
        BudgetError: nothing fits.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        batch: Any,
        host: HostTier,
        rule: str,
        *,
        optimizer: torch.optim.Optimizer,
        budget_bytes: int,
    ) -> None:
        samples = len(batch[0])
        step = TrainingStep(model, batch, samples, loss, [optimizer])
        sizes = (samples,) if batch_statistics_layers(model) else part_sizes(samples)
        costs = calibrate(step, host, budget_bytes=budget_bytes)
        memory = StepMemory(step, sizes, costs, check=True)
        needed = []
        for size in sizes:
            super().__init__(model, loss, batch, host, rule, size)
            scratch = costs.scratch(self.plan.sub_batch)
            self.peak_bytes = memory.exact_bytes(self.plan)[0] + scratch
            needed.append(self.peak_bytes + costs.spare_bytes)
            if needed[-1] <= budget_bytes:
                break
        else:
            raise BudgetError(
                f"{budget_bytes} bytes are too few for vDNN's rule {rule!r} in sub-batches",
                floor_bytes=min(needed),
                task="a sub-batch",
                layer="the model",
                hint="It offloads by kind of layer only.",
            )
        self._freed = FreedMemory(next(model.parameters()).device)
        there = [*model.parameters(), *model.buffers(), *tensors_in(list(optimizer.state.values())), *tensors_in(batch)]
        choice = PlanChoice(
            *(self.plan, 0, self.peak_bytes, 0.0, 0.0, 0, 0), scratch_bytes=scratch, spare_bytes=costs.spare_bytes
        )
        self._freed.hold(choice.reserved_bytes(budget_bytes), there)

    def remove(self) -> None:
        self._freed.close()
        super().remove()
