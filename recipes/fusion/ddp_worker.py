"""What each rank of the DDP recipe runs; Lightning joins them."""

import os
from typing import Any

import torch
import torch.distributed

from retime.foundations.workers import Answer
from retime.recipes.core.build import build_batches, build_model
from retime.recipes.core.measure import interleave
from retime.recipes.core.schema import FusionSettings, Hardware
from retime.recipes.fusion.trainer import WARMUP_STEPS, TrainerBlocks
from retime.recipes.models import parameter_count


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    """Step times of each variant as rank 0 sees them; None on other ranks."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if request["device"] == "cpu":
        cores = request["cores"]
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", rank)
    settings = FusionSettings(
        hardware=Hardware(name=request["device"], device=request["device"], cores=None),
        optimizer=request["optimizer"],
        variants=request["variants"],
        devices=request["devices"],
    )
    model = build_model(request["model"], torch.device("cpu"), request["seed"])
    steps = WARMUP_STEPS + request["steps"] + 1
    batches = build_batches(request["data"], request["batch_size"], steps * request["devices"], device)
    own = batches[rank :: request["devices"]]
    fits = TrainerBlocks(model, own, settings, distributed=request["devices"] > 1)
    times = interleave(fits.blocks(), request["rounds"], request["warmup_rounds"])
    digests = {name: fits.fit(name).weights for name in request["variants"]}
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world_size > 1:
        # Left to the interpreter's end, gloo's threads may outlive what they use, and the process aborts.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if rank != 0:
        return None
    same = [name for name, value in digests.items() if value == digests.get("fused")]
    facts = {"parameters": parameter_count(model), "final weights bit-identical to fused": ", ".join(same)}
    return {"world_size": world_size, "step_ms": times, "facts": facts}


def serve() -> Answer:
    """For `run_ranks`."""
    return answer
