"""Trains one network inside one budget, in a process of its own whose data bytes the kernel limits (see the sweep).

The first line asks for `plan`: what the step needs without a limit, and the floor; or for `train`, with a budget in
bytes or none. Then each `block` trains some steps, and `end` tells what the process held and writes the weights.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retime.mechanisms.memory.budgeted_step import BudgetedStep
from retime.mechanisms.memory.calibrate import calibrate
from retime.mechanisms.memory.floor import StepMemory
from retime.mechanisms.memory.heap import give_back_freed_memory, trim_heap
from retime.mechanisms.memory.host import parse_host
from retime.mechanisms.memory.replay import TrainingStep
from retime.mechanisms.memory.search import search_plan
from retime.mechanisms.memory_probe import MemoryProbe
from retime.recipes.build import CPU, build_batches, build_model, build_optimizer, loss_of
from retime.recipes.models import parameter_count
from retime.recipes.modnn_processes import serve_lines
from retime.schedules.memory.errors import BudgetError

MIB = 2**20
_EVERYTHING = 2**60
# Two calibrations differ by a little, and a floor holds what was calibrated.
_FLOOR_SHARE, _TRIES = 1.03, 4


class Training:
    """A model, its optimizer and one batch; with a budget, the steps of a :class:`BudgetedStep`."""

    def __init__(self, request: dict[str, Any], batch: tuple[Tensor, Tensor]) -> None:
        self.batch, self.samples = batch, len(batch[0])
        self.model: nn.Module = build_model(request["model"], CPU, request["seed"])
        self.optimizer = build_optimizer(request["optimizer"], self.model.parameters(), {})
        self._host = request["host"]
        self.inside: BudgetedStep | None = None

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.model(batch[0]), batch[1])

    def limit(self, budget_bytes: int) -> None:
        self.inside = BudgetedStep(self.model, [self.optimizer], budget_bytes, parse_host(self._host, "cpu"))
        self.inside.plan(self.loss, self.batch)

    def floor_bytes(self) -> int:
        """The smallest budget, from the refusal of a smaller one."""
        step = BudgetedStep(self.model, [self.optimizer], 1, parse_host(self._host, "cpu"))
        try:
            step.plan(self.loss, self.batch)
        except BudgetError as refusal:
            return refusal.floor_bytes
        finally:
            step.remove()
        raise AssertionError("a budget of one byte was accepted")

    def ideal_bytes(self) -> int:
        """What the plain step needs: its tensors and what operations need for themselves."""
        step = TrainingStep(self.model, self.batch, self.samples, self.loss, [self.optimizer])
        host = parse_host(self._host, "cpu")
        try:
            costs = calibrate(step, host)
        finally:
            host.close()
        return search_plan(step, _EVERYTHING, memory=StepMemory(step, (self.samples,), costs)).peak_bytes

    def step(self) -> None:
        self.optimizer.zero_grad()
        if self.inside is None:
            self.loss(self.batch).backward()  # type: ignore[no-untyped-call]
        else:
            self.inside.run(self.loss, self.batch)
        self.optimizer.step()

    def close(self) -> None:
        if self.inside is not None:
            self.inside.remove()


class Server:
    """Answers the recipe's requests."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._training: Training | None = None
        self._probe = MemoryProbe("cpu")
        self._base = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handlers = {"plan": self._plan, "train": self._train, "block": self._block, "end": self._end}
        return handlers[request["do"]](request)

    def _plan(self, request: dict[str, Any]) -> dict[str, Any]:
        give_back_freed_memory()
        (batch,) = build_batches(request["data"], request["batch_size"], 1)
        training = Training(request, batch)
        return {
            "ideal_bytes": training.ideal_bytes(),
            "floor_bytes": training.floor_bytes(),
            "parameters": parameter_count(training.model),
        }

    def _train(self, request: dict[str, Any]) -> dict[str, Any]:
        budget = request["budget_bytes"]
        if request["give_back"]:
            give_back_freed_memory()
        with tempfile.TemporaryFile() as kept:  # the batch counts, the data set it is taken from does not
            self._warm_up(request, kept, limited=budget is not None)
            gc.collect()
            trim_heap()
            self._base, data_bytes = _resident_bytes(), _data_bytes()
            kept.seek(0)
            training = self._training = Training(request, torch.load(kept))
        started = time.perf_counter()
        if budget == "floor":
            budget = _limit_to_floor(training)
        elif budget is not None:
            training.limit(budget)
        planning_s = time.perf_counter() - started
        gc.collect()
        trim_heap()
        if budget is not None:  # planning itself copies parts of the batch and of the model
            limit = data_bytes + budget + request["headroom_bytes"]
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._probe.start()
        return {"planning_s": planning_s, "budget_bytes": budget}

    def _warm_up(self, request: dict[str, Any], kept: Any, limited: bool) -> None:
        """Everything once with few samples: code and what libraries keep would count as the model's otherwise."""
        (batch,) = build_batches(request["data"], request["batch_size"], 1)
        torch.save(batch, kept)
        kept.seek(0)
        torch.load(kept)
        training = Training(request, (batch[0][:8].clone(), batch[1][:8].clone()))
        del batch
        training.step()
        if limited:
            floor = training.floor_bytes()
            with contextlib.suppress(BudgetError):
                training.limit(int(1.2 * floor))
                training.step()
            training.close()

    def _block(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._training is not None
        times = []
        for _ in range(request["steps"]):
            started = time.perf_counter()
            self._training.step()
            times.append(1e3 * (time.perf_counter() - started))
        return {"ms": times}

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        training = self._training
        assert training is not None
        self._probe.stop()
        answer: dict[str, Any] = {
            "measured_bytes": self._probe.peaks()["batch"] - self._base,
            "source": self._probe.note or self._probe.source,
        }
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
        torch.save([parameter.detach() for parameter in training.model.parameters()], request["weights"])
        return answer


def _limit_to_floor(training: Training) -> int:
    budget = int(_FLOOR_SHARE * training.floor_bytes())
    for _ in range(_TRIES):
        try:
            training.limit(budget)
            return budget
        except BudgetError as refusal:
            training.close()
            budget = int(_FLOOR_SHARE * refusal.floor_bytes)
    training.limit(budget)
    return budget


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


if __name__ == "__main__":
    serve_lines(Server().answer)
