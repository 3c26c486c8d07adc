"""vDNN's rule (Rhu et al. 2016; moDNN, sections 2 and 7.2) executed for real: what is offloaded follows from the kind
of layer, not from the budget. The batch stays whole, or is cut into parts by whoever chooses their size (vDNN+)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool import FreedMemory
from retime.foundations.parts import balanced_parts, batch_statistics_layers
from retime.foundations.preserve_state import preserve_state
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private.nn_and_optim import ConvBase
from retime.foundations.torch_private.tensors import storage_address
from retime.mechanisms.memory_budget import (
    HostNull,
    HostTier,
    OffloadSavedTensors,
    PlanChoice,
    StepMemory,
    TrainingStep,
    calibrate,
    part_sizes,
)
from retime.schedules.budget import BudgetError, OffloadPlan

ALL, CONVOLUTIONS = "all", "conv"


class Vdnn:
    """Forward and backward passes of one batch under vDNN's rule.

    What the forward pass saves leaves as soon as it is saved, and the next storage comes back while one is used: a copy
    overlaps with one task, as in vDNN (moDNN, Figure 4). The storage that is saved last, which the backward pass reads
    first, stays.

    Args:
        model, loss, batch: the step; `loss` runs `model`.
        host: where storages go; closed by `remove`.
        rule: "all" offloads what any layer saves, "conv" only what convolutions read.
        sub_batch: the most samples at once; parts count by how many they have, as in a loss that is a mean.

    Raises:
        ValueError: another rule, or "conv" for a network without convolutions.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        batch: Any,
        host: HostTier,
        rule: str,
        sub_batch: int | None = None,
    ) -> None:
        if rule not in (ALL, CONVOLUTIONS):
            raise ValueError(f"vDNN's rule {rule!r}: choose {ALL!r} or {CONVOLUTIONS!r}")
        self._loss, self._host = loss, host
        self._steps = 0
        self._samples = len(batch[0])
        self._parts = balanced_parts(batch, sub_batch or self._samples)
        self._fixed = [*model.parameters(), *model.buffers()]
        part = self._parts[0]
        reads, plan = _ConvolutionInputs(), OffloadPlan(len(part[0]))
        keep = [*self._fixed, *tensors_in(part)]
        with preserve_state(model), reads.watching(model), OffloadSavedTensors(plan, HostNull(), keep, observer=reads):
            loss(part)
        saved = len(reads.numbers)
        wanted = frozenset(range(saved - 1)) if rule == ALL else frozenset(reads.read - {saved - 1})
        if not wanted:
            raise ValueError(f"vDNN's rule {rule!r} finds nothing to offload in {type(model).__name__}")
        self.plan = OffloadPlan(len(part[0]), wanted, prefetch=1, saved=saved)
        self._offload = OffloadSavedTensors(self.plan, host)

    def run(self) -> None:
        """Forward and backward pass of all parts."""
        for part in self._parts:
            self._offload.keep = [*self._fixed, *tensors_in(part)]
            with self._offload:
                loss = self._loss(part)
            share = len(part[0]) / self._samples
            (loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
            del loss
        self._steps += 1

    def moved_bytes(self) -> float:
        """Out and back, a step."""
        report = self._offload.report()
        return (report.bytes_out + report.bytes_in) / max(1, self._steps)

    def remove(self) -> None:
        """Give back the host's space."""
        self._host.close()


class VdnnPlus(Vdnn):
    """Vdnn with the largest sub-batches that fit; tensors come from the pool that plans of this project use.

    The budget is for everything, the optimizer's states too; `peak_bytes` is predicted. BudgetError if nothing fits.
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


class _ConvolutionInputs:
    """An observer that notes the numbers of saved storages, and of those that a convolution has as its input."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.read: set[int] = set()
        self._input = 0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._input = storage_address(inputs[0].untyped_storage())

        def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._input = 0

        with ExitStack() as hooks:
            for layer in (module for module in model.modules() if isinstance(module, ConvBase)):
                hooks.enter_context(layer.register_forward_pre_hook(enter))
                hooks.enter_context(layer.register_forward_hook(leave))
            yield

    def inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def saved(self, number: int, storage: torch.UntypedStorage) -> None:
        self.numbers.add(number)
        if self._input == storage_address(storage):
            self.read.add(number)

    def restored(self, number: int, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Nothing to note."""
