"""The ranks of a machine update a model's parameters together, and hold the optimizer's state once."""

from retime.mechanisms.ddp.host_update.host_update import HostUpdate
from retime.mechanisms.ddp.host_update.report import HostUpdateReport

__all__ = ["HostUpdate", "HostUpdateReport"]
