"""Starts one worker a host, watches them, and hands back what each answered. If one fails, the others are ended."""

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from retime.foundations.workers import Server, Worker, WorkerError, closing, rank_variables
from retime.recipes.emulated.network import Network

_GRACE_SECONDS = 3.0
"""How long the other ranks may take to say in their output what they saw of a rank's death."""


class RankError(RuntimeError):
    """A rank failed, or all took too long; the message has the end of each rank's output."""


def run_ranks(
    network: Network,
    server: Server,
    request: dict[str, Any],
    *,
    timeout_s: float = 600,
    environment: dict[str, str] | None = None,
    started_with: dict[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Ask a worker on every host for an answer to `request`, and return the answers by rank.

    The ranks get torchrun's environment variables, so Lightning joins them and starts none of its own; a server that
    `joined` makes is in a process group of gloo's. `environment` adds more, and so does `started_with`, from a
    process's first instruction on, for the C library. What rank 0 tells goes to `progress`.

    Raises:
        RankError: a rank died or failed, or `timeout_s` went by. None is left running.
    """
    ranks: dict[str, Worker] = {}
    with closing(ranks):
        for rank, host in enumerate(network.hosts):
            first = network.hosts[0].address
            of_rank = rank_variables(rank, len(network.hosts), network.port, first, host.interface)
            variables = {**(environment or {}), **of_rank}
            told = progress if rank == 0 else lambda text: None
            worker = Worker(
                server,
                None,
                timeout_s,
                launch=host.launch,
                environment=started_with,
                variables=variables,
                progress=told,
            )
            ranks[str(rank)] = worker
            worker.tell(request)
        return _answers(list(ranks.values()), f"{server.__module__}", timeout_s)


def _answers(ranks: list[Worker], module: str, timeout_s: float) -> list[Any]:
    waiting = {worker.connection: rank for rank, worker in enumerate(ranks)}
    answers: dict[int, Any] = {}
    deadline, reason = time.monotonic() + timeout_s, ""
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            rank = waiting[ready]  # type: ignore[index]
            try:
                if not ranks[rank].heard(0):
                    continue
                answers[rank] = ranks[rank].answered
            except WorkerError as error:
                if not reason:
                    reason = f"rank {rank} of {len(ranks)} failed: {error}"
                    deadline = time.monotonic() + _GRACE_SECONDS
            del waiting[ready]  # type: ignore[arg-type]
    if waiting and not reason:
        reason = f"the ranks took longer than {timeout_s:.0f} s: use smaller sizes or fewer rounds"
    if reason:
        tails = [f"--- rank {rank}:\n{worker.printed()}" for rank, worker in enumerate(ranks)]
        raise RankError("\n".join([f"{module}: {reason}", *tails]))
    return [answers[rank] for rank in range(len(ranks))]
