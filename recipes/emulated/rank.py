"""A rank's own side of `run_ranks`: pinned to one core, joined to the others by gloo, gone when its parent is."""

import ctypes
import datetime
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from retime.recipes.emulated.ranks import PROGRESS

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOST_SECONDS = 60.0
"""A collective that takes longer means that another rank is gone."""


def serve_rank(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Join the process group, call `answer(request)`, write what it returns, and end this process.

    Exit status 1 and a traceback on any error; the parent then ends the other ranks.
    """
    _end_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    code = 1
    try:
        request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_LOST_SECONDS))
        reply = Path(sys.argv[2])
        draft = reply.with_suffix(".part")
        draft.write_text(json.dumps(answer(request)), encoding="utf-8")
        os.replace(draft, reply)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # the ranks' collectives no longer match: this process is of no more use
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # At the interpreter's own end gloo's threads may outlive what they use, and the process aborts.
    os._exit(code)


def tell(text: str) -> None:
    """Report progress to the parent, from rank 0."""
    if dist.get_rank() == 0:
        print(f"{PROGRESS}{text}", flush=True)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["RETIME_PARENT"]):
        os._exit(1)  # the parent ended before we asked
