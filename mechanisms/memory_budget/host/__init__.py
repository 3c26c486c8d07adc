"""Where offloaded storages go: a file, pinned memory, or nowhere in dry runs."""

from retime.mechanisms.memory_budget.host.disk import HostDisk
from retime.mechanisms.memory_budget.host.last_owner import is_torchs_own, raise_interruption, watch, working
from retime.mechanisms.memory_budget.host.null import HostNull
from retime.mechanisms.memory_budget.host.parse import check_host_text, parse_host
from retime.mechanisms.memory_budget.host.pinned import HostMemory
from retime.mechanisms.memory_budget.host.tier import HostCopy, HostError, HostNone, HostTier, Loading, check_host

__all__ = [
    "HostCopy",
    "HostDisk",
    "HostError",
    "HostMemory",
    "HostNone",
    "HostNull",
    "HostTier",
    "Loading",
    "check_host",
    "check_host_text",
    "is_torchs_own",
    "parse_host",
    "raise_interruption",
    "watch",
    "working",
]
