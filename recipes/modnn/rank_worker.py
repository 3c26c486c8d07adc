"""One of several ranks that train one batch together, each inside a budget: what `modnn_fig17` times."""

import gc
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.cpu_pool import FreedMemory, trim_heap
from retime.foundations.measure import MemoryProbe
from retime.foundations.streams import has_streams
from retime.foundations.torch_private.distributed import GradBucket
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.mechanisms.memory_budget import (
    BudgetedDataParallelStep,
    OffloadSavedTensors,
    PlanFileError,
    bucket_bytes,
    parse_host,
)
from retime.recipes.core.build import build_model, build_optimizer, loss_of
from retime.recipes.cpuacc.naive import ONE_BUCKET_MB, RootUpdate
from retime.recipes.modnn.budget_worker import Batch, resident_bytes
from retime.schedules.budget import BudgetError, OffloadPlan

ONE, WHOLE = "one process", "whole batches"
ONCE, EACH = "reduced once a batch", "reduced after every sub-batch"
NAIVE, NAIVE_ONCE = "whole batches, naive", "once a batch, naive"
"""The paper's baselines: a root updates and broadcasts."""
ON_HOST = "once a batch, on the host"
"""The paper's way: the host adds up while the last sub-batch runs."""
PLANNED = (ONCE, NAIVE_ONCE, ON_HOST)
"""The ways inside a budget, by one plan where it holds in all of them."""


class Rank:
    """Answers `join`, then `block`s of steps, then `end`; all ranks are asked the same at the same time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._reduced_bytes = self._steps = 0

    def join(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the model, take this rank's share of the batch, and take up the plan, which the first way makes.

        All ways take tensors from the same pool, which holds what the plan, or the whole step, needs: they are not to
        differ by what an allocator does.
        """
        rank, ranks = request["rank"], request["ranks"]
        self._way: str = request["way"]
        on_cpu = request["device"] == "cpu"
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
        self._root: RootUpdate | None = None
        self._on_host: BucketReduction | None = None
        self._plan: OffloadPlan | None = None
        cores = sorted(os.sched_getaffinity(0))
        if on_cpu:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        else:
            torch.cuda.set_device(self._device)
        backend, rendezvous = "gloo" if on_cpu else "nccl", f"file://{request['rendezvous']}"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
        self._rehearse(request, _share(request, self._device))
        gc.collect()
        trim_heap()
        self._base = resident_bytes(self._device)
        self._batch = _share(request, self._device)
        self._module: nn.Module = build_model(request["model"], self._device, request["seed"])
        self._model = self._module
        self._optimizer = build_optimizer(request["optimizer"], self._module.parameters(), {})
        if self._way != ONE:
            self._model = self._wrapped(self._module)
        answer = self._within_budget(request) if self._way in PLANNED else self._take_up(request)
        gc.collect()
        trim_heap()
        self._probe = MemoryProbe(self._device)
        self._probe.start()
        return {"cores": len(cores), "plan": "no budget" if self._plan is None else str(self._plan), **answer}

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        """Have this way's gradients added up at a root, on the host or by DDP."""
        naive = self._way in (NAIVE, NAIVE_ONCE)
        model = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB if naive else None)
        if naive:
            self._root = RootUpdate(model)
        elif self._way == ON_HOST:
            self._on_host = BucketReduction(model, HostReducer(self._device))
        else:
            model.register_comm_hook(None, self._reduce)
        return model

    def _rehearse(self, request: dict[str, Any], batch: Batch) -> None:
        """Two steps of a model that is not kept: code that is loaded or generated is not the model's.

        Two, since DDP allocates its buckets once more after the first. If there is no plan yet, rank 0 saves its own.
        """
        module = build_model(request["model"], self._device, request["seed"])
        optimizer = build_optimizer(request["optimizer"], module.parameters(), {})
        model = module if self._way == ONE else self._wrapped(module)
        samples = OffloadPlan.parse(request["plan"]).sub_batch if self._way == EACH else len(batch[0])
        part = batch[0][:samples], batch[1][:samples]
        inside = self._budgeted(request, model, optimizer) if self._way in PLANNED else None
        with suppress(BudgetError, PlanFileError):  # then the step that is to train says so, or plans for itself
            for _ in range(2):
                optimizer.zero_grad()
                if inside is None:
                    loss_of(model(part[0]), part[1]).backward()  # type: ignore[no-untyped-call]
                else:
                    inside.run(lambda some: loss_of(model(some[0]), some[1]), part)
                optimizer.step()
        if inside is not None:
            if request["rank"] == 0 and inside.report().plans and not Path(request["plans"]).exists():
                inside.save_plan(request["plans"])
            dist.barrier()
            inside.remove()
        if self._on_host is not None:
            self._on_host.close()
        self._reduced_bytes = 0

    def _budgeted(
        self, request: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> BudgetedDataParallelStep:
        """Steps inside the budget, by the saved plan as soon as there is one."""
        assert isinstance(model, DistributedDataParallel)
        host = parse_host(request["host"], self._device)
        plan = request["plans"] if Path(request["plans"]).exists() else None
        return BudgetedDataParallelStep(model, [optimizer], request["budget_bytes"], host, plan=plan)

    def _within_budget(self, request: dict[str, Any]) -> dict[str, Any]:
        self._inside = self._budgeted(request, self._model, self._optimizer)
        try:
            shape = self._inside.plan(self._loss, self._batch)
        except PlanFileError:  # this way needs more beside it, as one bucket does: it gets a plan of its own
            self._inside.remove()
            self._inside = self._budgeted({**request, "plans": request["plans"] + ".own"}, self._model, self._optimizer)
            shape = self._inside.plan(self._loss, self._batch)
        self._plan = shape.choice.plan
        return {
            "in_flight_bytes": shape.choice.in_flight_bytes,
            "predicted_bytes": shape.choice.peak_bytes,
            "reserved_bytes": shape.choice.reserved_bytes(request["budget_bytes"]),
        }

    def _take_up(self, request: dict[str, Any]) -> dict[str, Any]:
        """``EACH`` has the same plan, by hand; the others have none."""
        self._host = parse_host(request["host"], self._device)
        if self._way == EACH:
            self._plan, self._in_flight_bytes = OffloadPlan.parse(request["plan"]), request["in_flight_bytes"]
        self._freed = FreedMemory(self._device)
        beside = bucket_bytes(self._model) if self._way in (WHOLE, NAIVE) else 0
        there = [*self._module.parameters(), *self._module.buffers(), *self._batch]
        self._freed.hold(request["reserved_bytes"] + beside, there)
        return {}

    def _reduce(self, state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The communication hook. torch asks for the annotations themselves, not for their names."""
        group = dist.group.WORLD
        assert group is not None
        self._reduced_bytes += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    def _loss(self, batch: Batch) -> Tensor:
        return loss_of(self._model(batch[0]), batch[1])

    def _step(self) -> None:
        self._optimizer.zero_grad()
        if self._way in PLANNED:
            self._inside.run(self._loss, self._batch)
        elif self._plan is None:
            self._loss(self._batch).backward()  # type: ignore[no-untyped-call]
        else:
            self._reduce_each(self._plan)
        if self._root is None or dist.get_rank() == 0:
            self._optimizer.step()
        if self._root is not None:
            self._root.broadcast_weights()
        self._steps += 1
        if self._steps == 2:  # in which DDP has made its buckets once more
            trim_heap()  # all ways alike: of what its first buckets were

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
        keep = [*self._module.parameters(), *self._module.buffers(), *part]
        return OffloadSavedTensors(plan, self._host, keep, self._in_flight_bytes, on_mismatch=lambda mismatch: None)

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the milliseconds of so many steps."""
        times = []
        for _ in range(request["steps"]):
            dist.barrier()
            started = time.perf_counter()
            self._step()
            if has_streams(self._device):
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        return {"ms": times}

    def end(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the weights; return what the process held and moved."""
        self._probe.stop()
        if self._way in PLANNED:
            self._inside.remove()
        else:
            self._freed.close()
            self._host.close()
        if self._on_host is not None:
            self._on_host.close()
        torch.save([parameter.detach().cpu() for parameter in self._module.parameters()], request["weights"])
        dist.barrier()
        dist.destroy_process_group()
        return {
            "reduced_bytes": self._reduced_bytes / max(1, self._steps),
            "measured_bytes": self._probe.peaks()["batch"] - self._base,
        }


def _share(request: dict[str, Any], device: torch.device) -> Batch:
    """This rank's samples."""
    inputs, targets = torch.load(request["batch"])
    share = len(inputs) // request["ranks"]
    own = slice(request["rank"] * share, (request["rank"] + 1) * share)
    return inputs[own].to(device, copy=True), targets[own].to(device, copy=True)
