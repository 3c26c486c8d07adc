"""Workers on every host of a network: how they are started and watched, a rank's own side, and what the links carry.

If one rank fails, the others are ended. A rank is pinned to one core and joined to the others by gloo.
"""

import datetime
import functools
import gc
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from retime.foundations import workers
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
            callback = progress if rank == 0 else lambda text: None
            worker = Worker(
                server,
                None,
                timeout_s,
                launch=host.launch,
                environment=started_with,
                variables=variables,
                progress=callback,
            )
            ranks[str(rank)] = worker
            worker.tell(request)
        waiting = {worker.connection: rank for rank, worker in ranks.items()}
        answers: dict[str, Any] = {}
        deadline, reason = time.monotonic() + timeout_s, ""
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                name = waiting[ready]  # type: ignore[index]
                try:
                    if not ranks[name].heard(0):
                        continue
                    answers[name] = ranks[name].answered
                except WorkerError as error:
                    if not reason:
                        reason = f"rank {name} of {len(ranks)} failed: {error}"
                        deadline = time.monotonic() + _GRACE_SECONDS
                del waiting[ready]  # type: ignore[arg-type]
        if waiting and not reason:
            reason = f"the ranks took longer than {timeout_s:.0f} s: use smaller sizes or fewer rounds"
        if reason:
            tails = [f"--- rank {name}:\n{worker.printed()}" for name, worker in ranks.items()]
            raise RankError("\n".join([f"{server.__module__}: {reason}", *tails]))
        return [answers[name] for name in ranks]


_LOST_SECONDS = 60.0
"""A collective that takes longer means that another rank is gone."""


def joined(answer: Callable[[dict[str, Any]], Any]) -> workers.Answer:
    """`answer` in a process group: joined before the one request, left after it.

    A request may name another `backend`. A rank that drives a GPU has its share of the cores instead of a single one.
    """

    @functools.wraps(answer)  # a worker is sent its name
    def in_group(request: dict[str, Any]) -> Any:
        cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ["RANK"])
        own = cores[rank % len(cores) :: int(os.environ["WORLD_SIZE"])]
        os.sched_setaffinity(0, own if request.get("hardware", {}).get("device") == "cuda" else own[:1])
        torch.set_num_threads(1)
        dist.init_process_group(request.get("backend", "gloo"), timeout=datetime.timedelta(seconds=_LOST_SECONDS))
        result = answer(request)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        return result

    return in_group


def tell(text: str) -> None:
    """Report progress to the parent, from rank 0."""
    if dist.get_rank() == 0:
        workers.tell(text)


MIB = 2**20


def measure_bandwidth(mib: int = 8, repeats: int = 3) -> dict[str, float | None]:
    """Bits per second of one link in one direction; None on a single host.

    `gloo_bits` counts what a ring all-reduce has to send, 2 (n-1)/n of the tensor, so it can be held against the rate.
    Sends `mib` MiB `repeats` times each way, and takes the fastest: others use this machine's cores too.
    """
    if dist.get_world_size() == 1:
        return {"gloo_bits": None, "tcp_bits": None}
    return {"gloo_bits": _all_reduce_bits(mib, repeats), "tcp_bits": _tcp_bits(mib, repeats)}


def sent_bytes(tensor_bytes: float, hosts: int) -> float:
    """Bytes each host sends in a ring all-reduce: reduce-scatter, then all-gather (Patarasuk and Yuan 2009)."""
    return 2 * (hosts - 1) / hosts * tensor_bytes


def _all_reduce_bits(mib: int, repeats: int) -> float:
    tensor = torch.zeros(mib * MIB // 4)
    dist.all_reduce(tensor)  # opens the connections
    times = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - started)
    return sent_bytes(mib * MIB, dist.get_world_size()) * 8 / min(times)


def _tcp_bits(mib: int, repeats: int) -> float:
    """From rank 1 to rank 0, whose address is the group's."""
    objects: list[float | int | None] = [None]
    if dist.get_rank() == 0:
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) as server:
            objects[0] = server.getsockname()[1]
            dist.broadcast_object_list(objects, src=0)
            connection, _ = server.accept()
            with connection:
                objects[0] = max(_receive(connection, mib * MIB) for _ in range(repeats))
    else:
        dist.broadcast_object_list(objects, src=0)
        if dist.get_rank() == 1:
            with socket.create_connection((os.environ["MASTER_ADDR"], int(objects[0] or 0))) as connection:
                for _ in range(repeats):
                    connection.sendall(bytes(mib * MIB))
                    connection.recv(1)
    dist.broadcast_object_list(objects, src=0)
    return float(objects[0] or 0)


def _receive(connection: socket.socket, size: int) -> float:
    """Bits per second from the first byte on."""
    buffer = bytearray(MIB)
    left = size - connection.recv_into(buffer)
    first, started = size - left, time.perf_counter()
    while left > 0:
        got = connection.recv_into(buffer, min(left, MIB))
        if not got:
            raise ConnectionError("the sending rank closed its connection: see its output")
        left -= got
    seconds = time.perf_counter() - started
    connection.sendall(b".")
    return (size - first) * 8 / seconds
