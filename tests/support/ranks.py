"""Run a worker script as gloo ranks, two or more, and collect what they print.

Where starting ranks takes longer than most cases, a script runs many: `run_cases` there, `said_in` here.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from retime.foundations.workers import free_port
from support.time_limits import limit_s
from support.warm_start import Cold, Warm


def run_two_ranks(script: str, *arguments: str, timeout_s: float = 180) -> list[subprocess.CompletedProcess[str]]:
    """Start `tests/support/<script>` twice, with the variables torchrun sets; every process is gone afterwards."""
    return run_ranks(2, script, *arguments, timeout_s=timeout_s)


def run_ranks(
    count: int, script: str, *arguments: str, timeout_s: float = 180, warm: bool = True
) -> list[subprocess.CompletedProcess[str]]:
    """Start `tests/support/<script>` so many times, with torchrun's variables; every process is gone afterwards.

    What Lightning wrote into this process's environment (``PL_...``: a seed, for one) is not passed on.

    Args:
        warm: with everything imported; else from nothing, so that the environment's settings of the C library count.
    """
    tests = Path(__file__).parents[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    start = Warm if warm else Cold
    path = str(Path(__file__).with_name(script))
    with ExitStack() as ends:
        folder = Path(ends.enter_context(TemporaryDirectory()))
        ranks = []
        for rank in range(count):
            own = {**inherited, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out, errors = folder / f"{rank}.out", folder / f"{rank}.err"
            ranks.append((ends.enter_context(start(path, [*arguments], own, out, errors)), out, errors))
        for worker, _, _ in ranks:
            worker.wait(limit_s(timeout_s))
        return [
            subprocess.CompletedProcess([path, *arguments], worker.returncode or 0, _text(out), _text(errors))
            for worker, out, errors in ranks
        ]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def run_cases(
    functions: Mapping[str, Callable[..., Any]], cases: Sequence[str], before: Callable[[], Any] = lambda: None
) -> None:
    """On one rank: run these one after the other, each a function and its arguments: ``name|argument|argument``."""
    for case in cases:
        name, *arguments = case.split("|")
        before()
        print(f"== {case}", flush=True)
        functions[name](*arguments)
        dist.barrier()
        print("== done", flush=True)


def run_rank(
    functions: Mapping[str, Callable[..., Any]], cases: Sequence[str], *, joined: bool = True, **options: Any
) -> None:
    """All of one rank: it joins the others, unless its cases do so, runs the cases (see `run_cases`) and ends."""
    torch.set_num_threads(1)
    if joined:
        dist.init_process_group("gloo")
    run_cases(functions, cases, **options)
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


def said_in(ran: subprocess.CompletedProcess[str], case: str) -> str:
    """What a rank printed in one of its cases, which must have ended."""
    found = re.search(rf"^== {re.escape(case)}$(.*?)^== done$", ran.stdout, re.MULTILINE | re.DOTALL)
    assert found, f"{ran.stdout[-1000:]}\n{ran.stderr[-3000:]}"
    return found[1].strip()
