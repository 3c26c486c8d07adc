"""Ways to sum a bucket's gradients over ranks."""

from retime.mechanisms.ddp.reducers.host import HostReduction

__all__ = [
    "HostReduction",
]
