"""Whether a batch may be trained in parts: a probe of its gradients, and the flow of its operations."""

from retime.mechanisms.memory_budget.separability.altered import ALTERATIONS, Altered
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.separability.compared_sizes import compared
from retime.mechanisms.memory_budget.separability.watch import Compared

__all__ = [
    "ALTERATIONS",
    "Altered",
    "Compared",
    "certify",
    "compared",
]
