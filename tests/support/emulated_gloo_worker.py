"""A rank with gloo: measures the links, or fails on rank 1. See recipes/emulated/test_cluster.py."""

import os
from typing import Any

import torch
import torch.distributed as dist

from retime.recipes.emulated.ranks import joined, measure_bandwidth, tell


@joined
def serve(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "fail" and dist.get_rank() == 1:
        raise RuntimeError("rank 1 has had enough")
    tell("measuring")
    bandwidth = measure_bandwidth(request["mib"], repeats=2)
    return {**bandwidth, "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
