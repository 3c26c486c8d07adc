"""A bucket size for DistributedDataParallel, from what the network carries."""

import time
from typing import Any

import torch
import torch.distributed as dist

WIRE_SECONDS = 0.02
"""What a bucket should take: long against an all-reduce's fixed cost, short against a step that it has to hide in."""
SIZES_MB = (25, 16, 8, 4, 2, 1)
"""DistributedDataParallel's own default and below. Few, so that a measurement's noise seldom changes the choice."""
_PROBE_MB = 2
_REPEATS = 3


def bucket_mb(seconds_per_mb: float) -> int:
    """The largest of ``SIZES_MB`` that takes ``WIRE_SECONDS`` or less, else the smallest."""
    return next((size for size in SIZES_MB if size * seconds_per_mb <= WIRE_SECONDS), SIZES_MB[-1])


def measured_seconds_per_mb(group: Any = None) -> float:
    """Seconds that an all-reduce needs for each MiB, by the slowest rank's clock; all ranks get the same number.

    All ranks must call it. It sends 2 MiB a few times.
    """
    cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    probe = torch.zeros(_PROBE_MB * 2**18, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first one opens connections
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(probe, group=group)
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor([min(seconds[1:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest) / _PROBE_MB
