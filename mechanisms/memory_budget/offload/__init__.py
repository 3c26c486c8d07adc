"""Activations leave the device in the forward pass and come back in the backward pass (moDNN, section 5.2)."""

from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory, check_host_text, parse_host
from retime.mechanisms.memory_budget.offload.passes import ResidentTensor
from retime.mechanisms.memory_budget.offload.saved_tensors import (
    NoHooksError,
    OffloadReport,
    OffloadSavedTensors,
    PlanMismatch,
)
from retime.mechanisms.memory_budget.offload.tier import HostError, HostNone, HostNull, HostTier, check_host
