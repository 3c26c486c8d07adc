"""Pipeline parallel training of ordinary modules, with gradient fast-forwarding and modulo allocation."""

from retime.mechanisms.pipeline.errors import PipelineError, RankLostError
from retime.mechanisms.pipeline.pipeline_step import PipelineStep
from retime.mechanisms.pipeline.plan import SCHEDULES, check_schedule
from retime.mechanisms.pipeline.report import PipelineReport
from retime.mechanisms.pipeline.running_step import MicroBatchResult

__all__ = [
    "SCHEDULES",
    "MicroBatchResult",
    "PipelineError",
    "PipelineReport",
    "PipelineStep",
    "RankLostError",
    "check_schedule",
]
