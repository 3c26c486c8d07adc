"""Whether a batch may be trained in parts: a probe of its gradients, and the flow of its operations."""

from retime.mechanisms.memory_budget.separability.certify import certify, check_sizes
from retime.mechanisms.memory_budget.separability.watch import Compared
