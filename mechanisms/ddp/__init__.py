"""What every mechanism needs of DistributedDataParallel: its communication hook, buckets, reductions, agreement."""

from retime.mechanisms.ddp.agreement import RankAgreement
from retime.mechanisms.ddp.bucket_reduction import BucketReduction
from retime.mechanisms.ddp.bucket_size import bucket_mb, measured_seconds_per_mb
from retime.mechanisms.ddp.buckets import BucketMap, Region
from retime.mechanisms.ddp.comm_hook import CommHook, HookOwner, comm_hook_of, sparse_layer
from retime.mechanisms.ddp.end_of_backward import at_end_of_backward
from retime.mechanisms.ddp.host_report import HostReductionReport
from retime.mechanisms.ddp.host_update import HostUpdate, HostUpdateReport
from retime.mechanisms.ddp.lost_ranks import RankLostError, RankProcesses, is_lost_message
from retime.mechanisms.ddp.mean import scale
from retime.mechanisms.ddp.own_group import close_group, own_group
from retime.mechanisms.ddp.reductions import GradientWatch, Reduction, Reductions, release, settle_gradients

__all__ = [
    "BucketMap",
    "BucketReduction",
    "CommHook",
    "GradientWatch",
    "HookOwner",
    "HostReductionReport",
    "HostUpdate",
    "HostUpdateReport",
    "RankAgreement",
    "RankLostError",
    "RankProcesses",
    "Reduction",
    "Reductions",
    "Region",
    "at_end_of_backward",
    "bucket_mb",
    "close_group",
    "comm_hook_of",
    "is_lost_message",
    "measured_seconds_per_mb",
    "own_group",
    "release",
    "scale",
    "settle_gradients",
    "sparse_layer",
]
