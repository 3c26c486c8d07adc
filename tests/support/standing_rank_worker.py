"""Two gloo ranks, of which the second stands still; prints how many seconds the first one's abort took."""

import os
import signal
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from retime.foundations.ddp import OwnGroupsReducer

if __name__ == "__main__":
    dist.init_process_group("gloo")
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    reducer = OwnGroupsReducer(timeout=timedelta(seconds=40))
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while psutil.Process(processes[1]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.02)
        reducer.start(0, torch.ones(8))
        began = time.monotonic()
        reducer.abort()
        print(time.monotonic() - began, flush=True)
        os.kill(processes[1], signal.SIGKILL)
    os._exit(0)
