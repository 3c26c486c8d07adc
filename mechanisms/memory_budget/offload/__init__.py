"""Activations leave the device in the forward pass and come back in the backward pass (moDNN, section 5.2)."""

from retime.mechanisms.memory_budget.offload.saved import ResidentTensor
from retime.mechanisms.memory_budget.offload.saved_tensors import (
    NoHooksError,
    OffloadReport,
    OffloadSavedTensors,
    PlanMismatch,
)

__all__ = [
    "NoHooksError",
    "OffloadReport",
    "OffloadSavedTensors",
    "PlanMismatch",
    "ResidentTensor",
]
