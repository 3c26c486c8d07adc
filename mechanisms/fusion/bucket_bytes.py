"""How many bytes are gathered before one multi-tensor update."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.byte_sizes import parse_bytes
from retime.foundations.lazy_updates import nbytes

CPU_BUCKET_BYTES = 1 << 20
CUDA_BUCKET_BYTES = 8 << 20


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of the optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def default_bucket_bytes(parameters: Iterable[Tensor]) -> int:
    """Bucket size when the user names none: enough to keep the kernels busy, little enough to stay in the caches.

    A small model gets at least four buckets, or nothing would be left to fuse.
    """
    everything = list(parameters)
    most = CUDA_BUCKET_BYTES if any(parameter.is_cuda for parameter in everything) else CPU_BUCKET_BYTES
    return max(1, min(most, sum(map(nbytes, everything)) // 4))


def check_bucket_bytes(bucket_bytes: int | str | None) -> int | None:
    """The bytes that the argument asks for; None for the default."""
    return None if bucket_bytes is None else parse_bytes("bucket_bytes", bucket_bytes, examples="'1MiB', or None")
