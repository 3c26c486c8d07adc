"""Training steps in a process of its own, under a limit of data bytes: RAM is the device and a disk is the host.

    python memory_limit_worker.py FOLDER NET[,NET] [LIMIT_BYTES]

Prints one line of JSON: for each net, plain and offloaded, a hash of the gradients and, without a limit, the measured
and the predicted peak above the start; or ``{"error": ...}`` when memory ran out.
"""

import gc
import hashlib
import json
import resource
import sys
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from retime.foundations.cpu_pool.pool import give_back_freed_memory, trim_heap
from retime.foundations.measure import MemoryProbe, status_bytes
from retime.mechanisms.memory_budget.costs import StepCosts, calibrate
from retime.mechanisms.memory_budget.dry_run.run import EVERYTHING, TrainingStep, replay, take
from retime.mechanisms.memory_budget.offload.hosts import HostDisk
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors
from retime.schedules.budget import OffloadPlan


def network(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, a batch and its labels."""
    torch.manual_seed(0)
    if name == "conv":
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
        for _ in range(10):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        return nn.Sequential(*layers, *head), torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    layers = []
    for _ in range(12):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(16384, 64), torch.randint(0, 10, (16384,))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def run(step: TrainingStep, plan: OffloadPlan, host: HostDisk, probe: MemoryProbe | None = None) -> str:
    """Forward and backward passes of one batch; a hash of the gradients."""
    step.module.zero_grad()
    keep = [*step.module.parameters(), *step.module.buffers(), *step.batch]
    offload = OffloadSavedTensors(plan, host, keep, on_mismatch=lambda mismatch: None)
    if probe is not None:
        probe.start()
    for first in range(0, step.samples, plan.sub_batch):
        part = take(step.batch, first, first + plan.sub_batch)
        with offload:
            loss = step.loss(part) * (len(part[0]) / step.samples)
        loss.backward()
    if probe is not None:
        probe.stop()
    gradients = b"".join(parameter.grad.numpy().tobytes() for parameter in step.module.parameters())
    return hashlib.sha256(gradients).hexdigest()


def compare(step: TrainingStep, plan: OffloadPlan, host: HostDisk, costs: StepCosts) -> dict[str, object]:
    """The step's own gradients and its peak above the start, measured and predicted."""
    predicted = replay(step, plan, compare=False)
    run(step, plan, host)  # libraries allocate when they are first used
    step.module.zero_grad()
    gc.collect()
    trim_heap()
    probe = MemoryProbe("cpu")
    base = status_bytes("VmRSS")
    gradients = run(step, plan, host, probe)
    before = predicted.resident_bytes - sum(parameter.nbytes for parameter in step.module.parameters())
    return {
        "gradients": gradients,
        "measured": probe.peaks()["batch"] - base,
        "predicted": predicted.peak_with(costs.operations) + costs.scratch(plan.sub_batch) - before,
        "held": host.live_bytes(),
        "source": probe.source,
    }


def limited(step: TrainingStep, plan: OffloadPlan, host: HostDisk, limit_bytes: int) -> dict[str, object]:
    """The step's own gradients, if so many more bytes are enough."""
    step.loss(take(step.batch, 0, 1)).backward()
    bound = status_bytes("VmData") + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        return {"gradients": run(step, plan, host)}
    except RuntimeError as error:
        return {"error": str(error)}


def main() -> None:
    folder, names, *limit = sys.argv[1:]
    torch.set_num_threads(1)
    give_back_freed_memory()
    gc.freeze()  # collections are many, and need not look at all that torch consists of
    results: dict[str, dict[str, object]] = {}
    with HostDisk(folder) as host:
        for name in names.split(","):
            model, images, labels = network(name)
            samples = len(images)
            step = TrainingStep(model, (images, labels), samples, partial(loss_of, model))
            plans = {"plain": OffloadPlan(samples), "offload": OffloadPlan(samples, EVERYTHING, 0, len(EVERYTHING))}
            if limit:
                results[name] = {mode: limited(step, plan, host, int(limit[0])) for mode, plan in plans.items()}
            else:
                costs = calibrate(step, host)
                results[name] = {mode: compare(step, plan, host, costs) for mode, plan in plans.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
