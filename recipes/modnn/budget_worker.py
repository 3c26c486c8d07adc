"""Trains one network inside one budget, in a process of its own whose data bytes the kernel limits.

The first request to :class:`Server` is `plan`: what the step needs without a limit, and the floor, which is all; or
`train`, with a budget in bytes, "floor" or none, with a `rule` of vDNN, or with what a `peer` does by hand. Then each
`block` trains some steps, and `end` tells what the process held and moved and writes the weights. `refuse` is for a
budget below the floor: what the refusal says, whether that is so, and what had happened until then.
"""

from __future__ import annotations

import gc
import re
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from retime.foundations.cpu_pool import FreedMemory, give_back_freed_memory, trim_heap
from retime.foundations.measure import MemoryProbe, status_bytes
from retime.foundations.parts import balanced_parts, batch_statistics_layers
from retime.foundations.streams import has_streams
from retime.mechanisms.memory_budget import (
    BudgetedStep,
    PlanChoice,
    StepMemory,
    TrainingStep,
    calibrate,
    parse_host,
    search_plan,
)
from retime.recipes.core.build import CPU, build_model, build_optimizer, loss_of
from retime.recipes.models import parameter_count
from retime.recipes.modnn.vdnn import Vdnn, VdnnPlus
from retime.schedules.budget import BudgetError

PARTS, CHECKPOINT, SAVE_ON_CPU = "parts", "checkpoint", "save_on_cpu"
PEERS = (PARTS, CHECKPOINT, SAVE_ON_CPU)


def part_sizes(samples: int) -> set[int]:
    """Samples at once, of a batch of so many in 2 to 32 equal parts."""
    return {samples // count for count in (2, 4, 8, 16, 32) if samples >= count}


def saving(peer: str | None, device: torch.device = CPU) -> AbstractContextManager[object]:
    """Around the forward pass. On a processor `save_on_cpu` finds that the tensors are there, and does nothing."""
    return save_on_cpu(pin_memory=device.type == "cuda") if peer == SAVE_ON_CPU else nullcontext()


def checkpointed(model: nn.Module) -> nn.Module:
    """Have each block compute its forward pass again in the backward pass (Chen et al. 2016, `torch.utils.checkpoint`).

    Blocks are the members of lists of one class; a chain without any is cut into as many parts as each has layers.
    ValueError if it is neither.
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


Batch = tuple[Tensor, Tensor]


class Training:
    """A model, its optimizer and one batch; with a budget, the steps of a :class:`BudgetedStep`, or of vDNN."""

    def __init__(self, request: dict[str, Any]) -> None:
        batch: Batch = torch.load(request["batch"], map_location=request["device"])
        self.batch = batch = (batch[0].flip(0), batch[1].flip(0)) if request.get("reversed") else batch
        self.samples, self.device = len(batch[0]), batch[0].device
        self._peer = request.get("peer")
        model = build_model(request["model"], self.device, request["seed"])
        self.model = checkpointed(model) if self._peer == CHECKPOINT else model
        self.optimizer = build_optimizer(request["optimizer"], self.model.parameters(), {})
        self._host, self._sub_batches = request["host"], request.get("sub_batches", True)
        self.inside: BudgetedStep | None = None
        self.vdnn: Vdnn | None = None
        self._freed: FreedMemory | None = None
        self._parts = balanced_parts(batch, request.get("sub_batch", self.samples))

    def loss(self, batch: Batch) -> Tensor:
        return loss_of(self.model(batch[0]), batch[1])

    def limit(self, budget_bytes: int, plans: dict[str, Any] | None = None) -> None:
        """Plan for a budget, or take up plans that were made for it."""
        self.inside = self.budgeted(budget_bytes)
        if plans is not None:
            self.inside.load_state_dict(plans)
        self.inside.plan(self.loss, self.batch)

    def floor_bytes(self) -> int:
        """The smallest budget, from the refusal of a smaller one."""
        step = self.budgeted(1)
        try:
            step.plan(self.loss, self.batch)
        except BudgetError as refusal:
            return refusal.floor_bytes
        finally:
            step.remove()
        raise AssertionError("a budget of one byte was accepted")

    def plain_choice(self) -> PlanChoice:
        """The plain step, measured as a plan: its peak, and what is to stay free beside it."""
        step = TrainingStep(self.model, self.batch, self.samples, self.loss, [self.optimizer])
        host = parse_host(self._host, self.device)
        try:
            costs = calibrate(step, host)
        finally:
            host.close()
        return search_plan(step, 2**60, memory=StepMemory(step, (self.samples,), costs, check=True))

    def offload(self, rule: str, budget_bytes: int | None) -> None:
        """By vDNN's rule; inside a budget in sub-batches."""
        step = self.model, self.loss, self.batch, parse_host(self._host, self.device), rule
        if budget_bytes is None:
            self.vdnn = Vdnn(*step)
        else:
            self.vdnn = VdnnPlus(*step, optimizer=self.optimizer, budget_bytes=budget_bytes)

    def pool(self, reserved_bytes: int) -> None:
        """No plan: the plain step with tensors from the pool, which keeps freed memory up to so many bytes."""
        self._freed = FreedMemory(self.device)
        self._freed.hold(reserved_bytes, self._there())
        self._freed.forget_peak()

    def held_bytes(self) -> int | None:
        """The most that tensors held since :meth:`pool`; None where nobody counts."""
        peak = None if self._freed is None else self._freed.peak_bytes()
        return None if peak is None else peak + sum(tensor.nbytes for tensor in self._there())

    def _there(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.batch]

    def step(self) -> None:
        self.optimizer.zero_grad()
        if self.inside is not None:
            self.inside.run(self.loss, self.batch)
        elif self.vdnn is not None:
            self.vdnn.run()
        else:
            for part in self._parts:
                with saving(self._peer, self.device):
                    loss = self.loss(part) * (len(part[0]) / self.samples)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
        self.optimizer.step()

    def close(self) -> None:
        for part in (self.inside, self.vdnn):
            if part is not None:
                part.remove()
        if self._freed is not None:
            self._freed.close()

    def budgeted(self, budget_bytes: int) -> BudgetedStep:
        host = parse_host(self._host, self.device)
        return BudgetedStep(self.model, [self.optimizer], budget_bytes, host, sub_batches=self._sub_batches)


class Server:
    """Answers the recipe's requests."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def plan(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a step needs without a limit, and the floor."""
        give_back_freed_memory()
        training = Training(request)
        choice = training.plain_choice()
        return {
            "ideal_bytes": choice.peak_bytes + choice.spare_bytes,
            "plain_peak_bytes": choice.peak_bytes,
            "plain_reserved_bytes": choice.reserved_bytes(choice.peak_bytes),
            "floor_bytes": training.floor_bytes(),
            "parameters": parameter_count(training.model),
            "stays_whole": bool(batch_statistics_layers(training.model)),
        }

    def train(self, request: dict[str, Any]) -> dict[str, Any]:
        """Plan inside the budget; return it, the seconds of planning and the size of sub-batches."""
        budget, device = request["budget_bytes"], torch.device(request["device"])
        limit = None if has_streams(device) else request["limit"]  # no kernel limits a device's memory
        if request["give_back"] and limit is not None:
            give_back_freed_memory()
        plans = self._rehearse(request)
        gc.collect()
        trim_heap()
        self._base, data_bytes = resident_bytes(device), status_bytes("VmData")
        self._probe = MemoryProbe(device)
        if limit == "planning":
            plans = None
            _limit_data(data_bytes + budget + request["headroom_bytes"])
        training = self._training = Training(request)
        started = time.perf_counter()
        budget = self._begin(training, request, plans)
        planning_s = time.perf_counter() - started if plans is None else self._planning_s
        gc.collect()
        trim_heap()
        torch.cuda.empty_cache()
        if budget is not None and limit == "training":
            _limit_data(data_bytes + budget + request["headroom_bytes"])
        self._probe.start()
        inside = training.inside
        sub_batch = None if inside is None else inside.report().shapes[-1].choice.plan.sub_batch
        return {"planning_s": planning_s, "budget_bytes": budget, "sub_batch": sub_batch}

    def _rehearse(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Plan and train held to nothing, so that what libraries keep from now on is code, not the model's.

        oneDNN reserves 256 KiB of data for the code of every kernel, which RLIMIT_DATA counts and memory does not.
        With a plan it is all done a second time, with the plan of the first. Returns the plan, for a run that is to
        follow the same one: another would run other kernels.
        """
        plans = None
        for _ in range(2):  # taking a plan up again looks at other parts of the batch than making it does
            training = Training(request)
            started = time.perf_counter()
            self._begin(training, request, plans)
            if plans is None:
                self._planning_s = time.perf_counter() - started
            training.step()
            if "peer" in request or "sub_batch" in request:
                training.step()  # with the optimizer's states there
                # a pool that keeps what the plain step needs would hold more than the step needs in this way
                request["reserved_bytes"] = training.held_bytes() or request["reserved_bytes"]
            training.close()
            if training.inside is None:
                break
            plans = training.inside.state_dict()
        return plans

    def _begin(self, training: Training, request: dict[str, Any], plans: dict[str, Any] | None = None) -> int | None:
        """Plan, or what takes its place; returns the budget."""
        budget: int | str | None = request["budget_bytes"] if plans is None else plans["made_for"]["budget_bytes"]
        if isinstance(budget, str):
            return _limit_to_floor(training)
        if "reserved_bytes" in request:
            training.pool(request["reserved_bytes"])
        elif "rule" in request:
            training.offload(request["rule"], request["budget_bytes"])
        elif budget is not None:
            training.limit(budget, plans)
        return budget

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the milliseconds of so many steps.

        A device's memory goes back after each turn, for those of other processes: a step that does not count takes it.
        """
        streamed = has_streams(self._training.device)
        times = []
        for _ in range(request["steps"] + streamed):
            started = time.perf_counter()
            self._training.step()
            if streamed:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        torch.cuda.empty_cache()
        return {"ms": times[streamed:]}

    def end(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the weights; return what the process held and moved."""
        training = self._training
        self._probe.stop()
        answer: dict[str, Any] = {
            "measured_bytes": self._probe.peaks()["batch"] - self._base,
            "source": self._probe.note or self._probe.source,
        }
        if training.vdnn is not None:
            answer["moved_bytes"] = training.vdnn.moved_bytes()
            answer["rule"] = str(training.vdnn.plan)
            if isinstance(training.vdnn, VdnnPlus):
                answer["predicted_bytes"] = training.vdnn.peak_bytes
        if training.inside is not None:
            report = training.inside.report()
            choice = report.shapes[-1].choice
            moved = report.offload
            answer |= {
                "predicted_bytes": choice.peak_bytes,
                "plan": str(choice.plan),
                "sub_batch": choice.plan.sub_batch,
                "offloaded": len(choice.plan.offload),
                "predicted_slowdown": choice.step_ms / choice.plain_ms if choice.plain_ms else 1.0,
                "moved_bytes": (moved.bytes_out + moved.bytes_in) / report.steps if moved else 0,
                "replanned": report.replanned,
            }
        training.close()
        resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)
        torch.save([parameter.detach().cpu() for parameter in training.model.parameters()], request["weights"])
        return answer

    def refuse(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask for a budget of `share` of the floor, then for the floor that the refusal names."""
        training = Training(request)
        floor = training.floor_bytes()
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.inside = training.budgeted(int(request["share"] * floor))
        steps, message = 0, ""
        try:
            training.step()
            steps += 1
        except BudgetError as error:
            message = str(error)
        training.close()
        unchanged = all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))
        checks, at_floor = check(message, training)
        return {
            "steps before": steps,
            "weights unchanged": unchanged,
            "said": checks,
            "message": message,
            "at the floor it names": at_floor,
        }


def _limit_to_floor(training: Training) -> int:
    budget = training.floor_bytes()
    for _ in range(4):  # another calibration may find a higher one
        try:
            training.limit(budget)
            return budget
        except BudgetError as refusal:
            training.close()
            budget = refusal.floor_bytes
    training.limit(budget)
    return budget


def _limit_data(limit_bytes: int) -> None:
    """The kernel refuses this process data bytes beyond this."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def resident_bytes(device: torch.device = CPU) -> int:
    """Bytes that this process holds of the machine's memory, or of a CUDA device's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


FLOOR, TASK, LAYER, HINT = "a floor that trains", "an operation", "a layer of the model", "what would help"
_MESSAGE = re.compile(
    r"at least (?P<floor>\d+) bytes(?: \([^)]*\))? are needed"
    r"(?: at task '(?P<task>\w+)[^']*' of layer '(?P<layer>[^']*)')?\. (?P<hint>.*?) For batch size finders"
)


def check(message: str, training: Training) -> tuple[dict[str, bool], str]:
    """Checks of what a reader of the message can do with it, and what comes of training in the floor that it names."""
    match = _MESSAGE.search(message)
    if match is None:
        return dict.fromkeys((FLOOR, TASK, LAYER, HINT), False), "none was named"
    at_floor = "trained"
    try:
        training.limit(int(match["floor"]))
        training.step()
    except BudgetError as error:
        at_floor = str(error)
    finally:
        training.close()
    checks = {
        FLOOR: at_floor == "trained",
        TASK: hasattr(torch.ops.aten, match["task"] or ""),
        LAYER: match["layer"] in dict(training.model.named_modules()),
        HINT: bool(re.search(r"\b(would help|choose)\b", match["hint"])),
    }
    return checks, at_floor
