"""What every mechanism needs of DistributedDataParallel: its communication hook, buckets, reductions, agreement."""

from retime.foundations.ddp.agreement import RankAgreement
from retime.foundations.ddp.bucket_size import bucket_mb, measured_seconds_per_mb
from retime.foundations.ddp.buckets import BucketMap, Region
from retime.foundations.ddp.comm_hook import CommHook, HookOwner, comm_hook_of, sparse_layer
from retime.foundations.ddp.end_of_backward import at_end_of_backward
from retime.foundations.ddp.lost_ranks import RankLostError, RankProcesses, end_of_process, is_lost_message, machine
from retime.foundations.ddp.mean import scale
from retime.foundations.ddp.own_group import close_group, own_group
from retime.foundations.ddp.reducers import DeviceReducer, OwnGroupsReducer, Reducer
from retime.foundations.ddp.reductions import GradientWatch, Reduction, Reductions, release, settle_gradients

__all__ = [
    "BucketMap",
    "CommHook",
    "DeviceReducer",
    "GradientWatch",
    "HookOwner",
    "OwnGroupsReducer",
    "RankAgreement",
    "RankLostError",
    "RankProcesses",
    "Reducer",
    "Reduction",
    "Reductions",
    "Region",
    "at_end_of_backward",
    "bucket_mb",
    "close_group",
    "comm_hook_of",
    "end_of_process",
    "is_lost_message",
    "machine",
    "measured_seconds_per_mb",
    "own_group",
    "release",
    "scale",
    "settle_gradients",
    "sparse_layer",
]
