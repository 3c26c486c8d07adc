"""Which order: the tasks of a training step, plans as data, planners, validator, simulator.  Plain Python, no torch."""

from retime.schedules.buffers import Buffer, step_buffers
from retime.schedules.data_parallel import (
    Bucket,
    Communication,
    DataParallelTimeline,
    LayerCost,
    layer_buckets,
    simulate_data_parallel,
    size_buckets,
)
from retime.schedules.dependencies import dependencies
from retime.schedules.errors import ScheduleError
from retime.schedules.fusion import backward_fusion, baseline, forward_fusion
from retime.schedules.k_search import KSearch
from retime.schedules.network import Cluster, Link, Transfer
from retime.schedules.occupancy import (
    Device,
    Kernel,
    Kernels,
    RegionRun,
    TwoStreamTimeline,
    profile_regions,
    simulate_two_streams,
)
from retime.schedules.picture import picture
from retime.schedules.reverse_first_k import backward_to_forward, communicate_last, largest_k, reverse_first_k
from retime.schedules.schedule import Lane, Schedule
from retime.schedules.simulate import Timeline, simulate
from retime.schedules.tasks import Kind, Task
from retime.schedules.timeline import COLOURS, Span, write_chrome_trace, write_page, write_png
from retime.schedules.two_streams import (
    Profile,
    Region,
    SubStreamTask,
    TwoStreamSchedule,
    backward_and_forward_regions,
    joint_schedule,
    joint_schedule_within,
    one_stream,
    profiled_timeline,
    sub_stream_tasks,
    two_stream_buffers,
    validate_two_streams,
)
from retime.schedules.validate import execution_order, validate

__all__ = [
    "Bucket",
    "Buffer",
    "COLOURS",
    "Cluster",
    "Communication",
    "DataParallelTimeline",
    "Device",
    "KSearch",
    "Kernel",
    "Kernels",
    "Kind",
    "Lane",
    "LayerCost",
    "Link",
    "Profile",
    "Region",
    "RegionRun",
    "Schedule",
    "ScheduleError",
    "Span",
    "SubStreamTask",
    "Task",
    "Timeline",
    "Transfer",
    "TwoStreamSchedule",
    "TwoStreamTimeline",
    "backward_and_forward_regions",
    "backward_fusion",
    "backward_to_forward",
    "baseline",
    "communicate_last",
    "dependencies",
    "execution_order",
    "forward_fusion",
    "joint_schedule",
    "joint_schedule_within",
    "largest_k",
    "layer_buckets",
    "one_stream",
    "picture",
    "profile_regions",
    "profiled_timeline",
    "reverse_first_k",
    "simulate",
    "simulate_data_parallel",
    "simulate_two_streams",
    "size_buckets",
    "step_buffers",
    "sub_stream_tasks",
    "two_stream_buffers",
    "validate",
    "validate_two_streams",
    "write_chrome_trace",
    "write_page",
    "write_png",
]
