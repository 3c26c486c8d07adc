"""Updates that wait until somebody reads the parameter, by the user's own optimizer."""

from retime.foundations.lazy_updates.eligibility import (
    declare_per_parameter,
    is_fused_step,
    is_torchs_zero_grad,
    why_class_not_per_parameter,
    why_not_separable,
    why_not_this_step,
    why_not_this_zero_grad,
)
from retime.foundations.lazy_updates.optimizer_window import (
    PartialOptimizer,
    check_bucket_bytes,
    default_bucket_bytes,
    nbytes,
    parameters_of,
)
from retime.foundations.lazy_updates.pending import (
    PendingUpdate,
    WatchedState,
    aliased,
    can_wait,
    flush_before_opaque_forward,
    gradient_of,
    is_compiled,
    is_pending,
    pending_of,
    settle_all,
    unwatch,
    unwatchable_parameters,
    watch,
)
from retime.foundations.patching import ReplacedMethod

__all__ = [
    "PartialOptimizer",
    "PendingUpdate",
    "ReplacedMethod",
    "WatchedState",
    "aliased",
    "can_wait",
    "check_bucket_bytes",
    "declare_per_parameter",
    "default_bucket_bytes",
    "gradient_of",
    "is_compiled",
    "is_fused_step",
    "is_pending",
    "is_torchs_zero_grad",
    "nbytes",
    "parameters_of",
    "pending_of",
    "settle_all",
    "flush_before_opaque_forward",
    "unwatch",
    "unwatchable_parameters",
    "watch",
    "why_class_not_per_parameter",
    "why_not_separable",
    "why_not_this_step",
    "why_not_this_zero_grad",
]
