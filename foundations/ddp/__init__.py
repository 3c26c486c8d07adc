"""What every mechanism needs of DistributedDataParallel: its communication hook, buckets, reductions, agreement."""

from retime.foundations.ddp.agreement import (
    RankAgreement,
    RankLostError,
    RankProcesses,
    end_of_process,
    is_lost_message,
    machine,
)
from retime.foundations.ddp.comm_hook import (
    DeviceReducer,
    OwnGroupsReducer,
    Reducer,
    at_end_of_backward,
    close_group,
    comm_hook_of,
    own_group,
    scale,
    sparse_layer,
)
from retime.foundations.ddp.reductions import (
    BucketMap,
    KeptGradients,
    PendingGradient,
    Reduction,
    Reductions,
    Region,
    bucket_mb,
    measured_seconds_per_mb,
)
