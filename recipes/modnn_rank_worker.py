"""One of several ranks that train one batch together, each inside a budget: what `modnn_fig17` times."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.memory.budgeted_ddp import BudgetedDataParallelStep
from retime.mechanisms.memory.host import parse_host
from retime.mechanisms.memory.offload import OffloadSavedTensors
from retime.recipes.build import CPU, build_model, build_optimizer, loss_of
from retime.recipes.modnn_processes import Answer
from retime.schedules.memory import OffloadPlan

WHOLE, ONCE, EACH = "whole batches", "reduced once a batch", "reduced after every sub-batch"

Batch = tuple[Tensor, Tensor]


class Rank:
    """Answers `join`, then `block`s of steps, then `end`; all ranks are asked the same at the same time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._reduced_bytes = self._steps = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"join": self._join, "block": self._block, "end": self._end}[request["do"]](request)

    def _join(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the model, take this rank's share of the batch, and plan it if there is a budget."""
        rank, ranks = request["rank"], request["ranks"]
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        rendezvous = f"file://{request['rendezvous']}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
        inputs, targets = torch.load(request["batch"])
        share = len(inputs) // ranks
        own = slice(rank * share, (rank + 1) * share)
        self._batch = inputs[own].clone(), targets[own].clone()
        model = build_model(request["model"], CPU, request["seed"])
        self._ddp = DistributedDataParallel(model)
        self._ddp.register_comm_hook(None, self._reduce)
        self._optimizer = build_optimizer(request["optimizer"], model.parameters(), {})
        self._host = parse_host(request["host"], CPU)
        self._way: str = request["way"]
        self._plan: OffloadPlan | None = None
        if self._way == ONCE:
            self._inside = BudgetedDataParallelStep(self._ddp, [self._optimizer], request["budget_bytes"], self._host)
            choice = self._inside.plan(self._loss, self._batch).choice
            self._plan, self._in_flight_bytes = choice.plan, choice.in_flight_bytes
        elif self._way == EACH:  # every rank has to reduce as often, so all take one rank's plan
            self._plan, self._in_flight_bytes = OffloadPlan.parse(request["plan"]), request["in_flight_bytes"]
        if self._plan is None:
            return {"cores": len(cores), "plan": "no budget"}
        return {"cores": len(cores), "plan": str(self._plan), "in_flight_bytes": self._in_flight_bytes}

    def _reduce(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        group = dist.group.WORLD
        assert group is not None
        self._reduced_bytes += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    def _loss(self, batch: Batch) -> Tensor:
        return loss_of(self._ddp(batch[0]), batch[1])

    def _step(self) -> None:
        self._optimizer.zero_grad()
        if self._way == ONCE:
            self._inside.run(self._loss, self._batch)
        elif self._plan is None:
            self._loss(self._batch).backward()  # type: ignore[no-untyped-call]
        else:
            self._reduce_each(self._plan)
        self._optimizer.step()
        self._steps += 1

    def _reduce_each(self, plan: OffloadPlan) -> None:
        """The same sub-batches under plain DDP, which reduces all that was added up so far after each of them."""
        samples = len(self._batch[0])
        for first in range(0, samples, plan.sub_batch):
            inputs, targets = (tensor[first : first + plan.sub_batch] for tensor in self._batch)
            with self._offloading(plan, inputs, targets):
                loss = self._loss((inputs, targets)) * (len(inputs) / samples)
            loss.backward()  # type: ignore[no-untyped-call]

    def _offloading(self, plan: OffloadPlan, *part: Tensor) -> AbstractContextManager[Any]:
        if not plan.offload:
            return nullcontext()
        # what the forward pass saves of a weighted loss is one number more than was planned for: no matter
        keep = [*self._ddp.parameters(), *self._ddp.buffers(), *part]
        return OffloadSavedTensors(plan, self._host, keep, self._in_flight_bytes, on_mismatch=lambda mismatch: None)

    def _block(self, request: dict[str, Any]) -> dict[str, Any]:
        times = []
        for _ in range(request["steps"]):
            dist.barrier()
            started = time.perf_counter()
            self._step()
            times.append(1e3 * (time.perf_counter() - started))
        return {"ms": times}

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._way == ONCE:
            self._inside.remove()
        self._host.close()
        torch.save([parameter.detach() for parameter in self._ddp.module.parameters()], request["weights"])
        dist.barrier()
        dist.destroy_process_group()
        return {"reduced_bytes": self._reduced_bytes / max(1, self._steps)}


def serve() -> Answer:
    """For :class:`Worker`."""
    return Rank().answer
