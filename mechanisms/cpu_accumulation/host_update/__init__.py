"""The ranks of a machine update a model's parameters together, and hold the optimizer's state once."""

from retime.mechanisms.cpu_accumulation.host_update.host_update import HostUpdate
from retime.mechanisms.cpu_accumulation.host_update.report import HostUpdateReport

__all__ = [
    "HostUpdate",
    "HostUpdateReport",
]
