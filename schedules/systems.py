"""The ways of data-parallel training that the simulated recipes compare, and the best k of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from retime.schedules import (
    Cluster,
    Communication,
    DataParallelTimeline,
    KSearch,
    LayerCost,
    layer_buckets,
    simulate_data_parallel,
    size_buckets,
)

DDP, BYTEPS, PRIORITY = "ddp", "byteps_fifo", "byteps_priority"
OURS, OURS_PRIORITY, OURS_DDP = "reverse_first_k", "reverse_first_k_priority", "reverse_first_k_buckets"
HEADINGS = {
    DDP: "DDP: 25 MiB buckets, step waits for all",
    BYTEPS: "BytePS, partitions sent in the order made",
    PRIORITY: "BytePS, ideal priorities",
    OURS: "reverse first-k on BytePS",
    OURS_PRIORITY: "reverse first-k on ideal priorities",
    OURS_DDP: "reverse first-k on DDP's buckets",
}
BASELINE_OF = {OURS: BYTEPS, OURS_PRIORITY: PRIORITY, OURS_DDP: DDP}
_FIRST_BUCKET_BYTES = 2**20  # DistributedDataParallel's first bucket


@dataclass(frozen=True)
class Sizes:
    """Partition of the BytePS-like systems and bucket of the DDP-like ones, in bytes."""

    partition_bytes: int
    bucket_bytes: int


def run(
    system: str, costs: Sequence[LayerCost], cluster: Cluster, sizes: Sizes, k: int | None = None
) -> tuple[int, DataParallelTimeline]:
    """One system's step in steady state, with its k: the one given, or for ours the one that the search finds.

    Raises:
        KeyError: no such system.
    """
    if system not in BASELINE_OF or k is not None:
        return k or 0, _step(system, costs, cluster, sizes, k or 0)
    search = KSearch(len(costs))
    while (candidate := search.next_k) is not None:
        # to a nanosecond: sums of floats must not decide between equal k
        search.record(round(_step(system, costs, cluster, sizes, candidate).step_ms, 6) / 1e3)
    return search.best, _step(system, costs, cluster, sizes, search.best)


def _step(system: str, costs: Sequence[LayerCost], cluster: Cluster, sizes: Sizes, k: int) -> DataParallelTimeline:
    buckets = layer_buckets(costs)
    partitions = sizes.partition_bytes
    how = {
        DDP: lambda: Communication(
            size_buckets(costs, sizes.bucket_bytes, first_bytes=_FIRST_BUCKET_BYTES),
            cluster.all_reduce,
            cross_iteration=False,
        ),
        BYTEPS: lambda: Communication(buckets, cluster.push_pull, partition_bytes=partitions),
        PRIORITY: lambda: Communication(buckets, cluster.push_pull, "priority", partitions),
        OURS_DDP: lambda: Communication(
            size_buckets(costs, sizes.bucket_bytes, first_bytes=_FIRST_BUCKET_BYTES, k=k), cluster.all_reduce
        ),
    }
    return simulate_data_parallel(costs, how[{OURS: BYTEPS, OURS_PRIORITY: PRIORITY}.get(system, system)](), k=k)
