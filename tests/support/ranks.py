"""Run tests, or a script, as gloo ranks, two or more, and collect what they print.

A test under `on_ranks` is a function that each rank runs. Starting ranks takes longer than most of them, so that one
start runs eight of a file.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from retime.foundations.workers import free_port
from support.paths import TESTS
from support.time_limits import limit_s
from support.warm_start import Cold, Warm

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
"""This process's, in the tests that ranks run."""
SHARED = Path(os.environ.get("RETIME_TESTS_SHARED", "/nowhere"))
"""A folder that all of them see."""
_MODULE = "tests_on_ranks"
"""A test file's name on its ranks."""
_A_START = 8
_cases: dict[tuple[str, int, bool], list[str]] = defaultdict(list)


def on_ranks(
    *counts: Any, joined: bool = True, before: Callable[[], Any] = lambda: None
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Make a test of a function that runs on so many ranks, in processes that run up to seven others of the file.

    Args:
        counts: numbers of ranks, as of `pytest.mark.parametrize`.
        joined: False where the test makes the process group.
        before: runs on each rank before the test.
    """

    def decorate(body: Callable[[], None]) -> Callable[..., None]:
        if body.__module__ == _MODULE:
            body.before = before  # type: ignore[attr-defined]
            return body
        file, name = body.__code__.co_filename, body.__name__
        for count in counts:
            _cases[file, getattr(count, "values", [count])[0], joined].append(name)

        @pytest.mark.parametrize("ranks", counts)
        def test(ranks: int) -> None:
            for rank in _ran(file, ranks, joined, _cases[file, ranks, joined].index(name) // _A_START):
                said_in(rank, name)

        test.__name__, test.__doc__, test.__module__ = name, body.__doc__, body.__module__
        return test

    return decorate


@cache
def _ran(file: str, count: int, joined: bool, start: int) -> list[subprocess.CompletedProcess[str]]:
    cases = _cases[file, count, joined][start * _A_START : (start + 1) * _A_START]
    return run_ranks(count, file, *cases, joined=joined)


def run_ranks(
    count: int, script: str, *arguments: str, timeout_s: float = 180, warm: bool = True, joined: bool = True
) -> list[subprocess.CompletedProcess[str]]:
    """Start `tests/support/<script>` so many times, with torchrun's variables; every process is gone afterwards.

    Given a test's own `__file__`, each process runs functions of that file: the arguments, see `run_cases`.

    What Lightning wrote into this process's environment (``PL_...``: a seed, for one) is not passed on.

    Args:
        warm: with everything imported; else from nothing, so that the environment's settings of the C library count.
        joined: whether the functions of a test's file find a process group.
    """
    if Path(script).is_absolute():
        script, arguments = Path(__file__).name, (script, "joined" if joined else "alone", *arguments)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    start = Warm if warm else Cold
    path = str(Path(__file__).with_name(script))
    with ExitStack() as ends:
        folder = Path(ends.enter_context(TemporaryDirectory()))
        ranks = []
        for rank, variables in enumerate(torchrun_variables(count)):
            own = {**inherited, **variables, "RETIME_TESTS_SHARED": str(folder)}
            out, errors = folder / f"{rank}.out", folder / f"{rank}.err"
            ranks.append((ends.enter_context(start(path, [*arguments], own, out, errors)), out, errors))
        for worker, _, _ in ranks:
            worker.wait(limit_s(timeout_s))
        return [
            subprocess.CompletedProcess([path, *arguments], worker.returncode or 0, _text(out), _text(errors))
            for worker, out, errors in ranks
        ]


def torchrun_variables(count: int) -> list[dict[str, str]]:
    """What torchrun sets for each of so many ranks on this machine, and where they find the tests."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",  # Lightning then starts no processes of its own
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def run_cases(functions: Mapping[str, Callable[..., Any]], cases: Sequence[str]) -> None:
    """On one rank: run these one after the other, each a function and its arguments: ``name|argument|argument``."""
    for case in cases:
        name, *arguments = case.split("|")
        getattr(functions[name], "before", lambda: None)()
        print(f"== {case}", flush=True)
        functions[name](*arguments)
        dist.barrier()
        print("== done", flush=True)


def _main(file: str, joined: str, *cases: str) -> None:
    """One rank of a test's file."""
    spec = spec_from_file_location(_MODULE, file)
    sys.path[0] = str(Path(file).parent)
    sys.modules[_MODULE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    from retime.strategies.support import lightning_private

    lightning_private._TOGETHER_S = 0.2  # no scheduler is here that signals all ranks
    torch.set_num_threads(1)
    if joined == "joined":
        dist.init_process_group("gloo")
    run_cases(vars(module), cases)
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


def said_in(ran: subprocess.CompletedProcess[str], case: str) -> str:
    """What a rank printed in one of its cases, which must have ended."""
    found = re.search(rf"^== {re.escape(case)}$(.*?)^== done$", ran.stdout, re.MULTILINE | re.DOTALL)
    assert found, f"{ran.stdout[-1000:]}\n{ran.stderr[-3000:]}"
    return found[1].strip()


if __name__ == "__main__":
    _main(*sys.argv[1:])
