"""A rank's own side of `run_ranks`: pinned to one core, joined to the others by gloo."""

import datetime
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from retime.foundations import workers

_LOST_SECONDS = 60.0
"""A collective that takes longer means that another rank is gone."""


def joined(answer: Callable[[dict[str, Any]], Any]) -> workers.Answer:
    """`answer` in a process group: joined before the one request, left after it."""

    def in_group(request: dict[str, Any]) -> Any:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_LOST_SECONDS))
        found = answer(request)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        return found

    return in_group


def tell(text: str) -> None:
    """Report progress to the parent, from rank 0."""
    if dist.get_rank() == 0:
        workers.tell(text)
