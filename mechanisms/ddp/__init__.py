"""What every mechanism needs of DistributedDataParallel: buckets, reductions, agreement between ranks."""

from retime.mechanisms.ddp.agreement import RankAgreement
from retime.mechanisms.ddp.bucket_size import bucket_mb, measured_seconds_per_mb
from retime.mechanisms.ddp.buckets import BucketMap, Region
from retime.mechanisms.ddp.reductions import GradientWatch, Reduction, Reductions, release, settle_gradients

__all__ = [
    "BucketMap",
    "GradientWatch",
    "RankAgreement",
    "Reduction",
    "Reductions",
    "Region",
    "bucket_mb",
    "measured_seconds_per_mb",
    "release",
    "settle_gradients",
]
