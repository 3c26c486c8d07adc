"""What the links between the ranks really carry: a timed all-reduce, and plain TCP. Call it on every rank."""

import socket
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

MIB = 2**20


@dataclass(frozen=True)
class Bandwidth:
    """Bits per second of one link in one direction; None on a single host.

    `gloo_bits` counts what a ring all-reduce has to send, 2 (n-1)/n of the tensor, so it can be held against the rate.
    """

    gloo_bits: float | None
    tcp_bits: float | None


def measure_bandwidth(mib: int = 8, repeats: int = 3) -> Bandwidth:
    """Send `mib` MiB `repeats` times each way, and take the fastest: others use this machine's cores too."""
    if dist.get_world_size() == 1:
        return Bandwidth(None, None)
    return Bandwidth(_all_reduce_bits(mib, repeats), _tcp_bits(mib, repeats))


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
    from os import environ

    found: list[float | int | None] = [None]
    if dist.get_rank() == 0:
        with socket.create_server((environ["MASTER_ADDR"], 0)) as server:
            found[0] = server.getsockname()[1]
            dist.broadcast_object_list(found, src=0)
            connection, _ = server.accept()
            with connection:
                found[0] = max(_receive(connection, mib * MIB) for _ in range(repeats))
    else:
        dist.broadcast_object_list(found, src=0)
        if dist.get_rank() == 1:
            with socket.create_connection((environ["MASTER_ADDR"], int(found[0] or 0))) as connection:
                for _ in range(repeats):
                    connection.sendall(bytes(mib * MIB))
                    connection.recv(1)
    dist.broadcast_object_list(found, src=0)
    return float(found[0] or 0)


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
