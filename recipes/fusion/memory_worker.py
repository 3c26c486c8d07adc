"""One variant's peak memory, measured in a process of its own (see `fusion_memory`)."""

import gc
import os
from typing import Any

import torch

from retime.foundations.measure import MemoryProbe
from retime.foundations.workers import Answer
from retime.recipes.core.build import build_batches, build_model
from retime.recipes.core.trainer_loop import GradientBytes
from retime.recipes.fusion.variants import VARIANTS, BareLoop
from retime.recipes.models import parameter_count


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes above the process without a model: peak of the first step, peak of later steps, gradients alive.

    The first step is apart because optimizers make their states in it, and backward fusion counts uses in it.
    """
    device = torch.device(request["device"])
    torch.set_num_threads(1)
    variant = VARIANTS[request["variant"]]
    tiny = BareLoop(
        variant, build_model(request["small_model"], device, 0), _batch(request, device), request["optimizer"]
    )
    tiny.block(1)  # loads kernels and code that would count as the model's otherwise
    del tiny
    gc.collect()
    before, source = _peak(device, lambda: None)
    model = build_model(request["model"], device, 0)
    loop = BareLoop(variant, model, _batch(request, device), request["optimizer"])
    first, _ = _peak(device, loop.step)
    later, _ = _peak(device, lambda: loop.block(request["steps"]))
    gradients = GradientBytes(model.parameters())
    loop.step()
    return {
        "first_bytes": first - before,
        "later_bytes": later - before,
        "gradient_bytes": gradients.peak,
        "parameters": parameter_count(model),
        "source": source,
        "process": os.getpid(),
    }


def _batch(request: dict[str, Any], device: torch.device) -> Any:
    (batch,) = build_batches(request["data"], request["batch_size"], 1, device)
    return batch


def _peak(device: torch.device, work: Any) -> tuple[int, str]:
    probe = MemoryProbe(device)
    probe.start()
    work()
    probe.stop()
    return probe.peaks()["batch"], probe.note or probe.source


def serve() -> Answer:
    """For `answer_once`."""
    return answer
