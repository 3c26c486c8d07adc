"""Updates that wait until somebody reads the parameter, by the user's own optimizer."""

from retime.foundations.lazy_updates.lazy import (
    PendingUpdate,
    can_wait,
    gradient_of,
    is_pending,
    pending_of,
    settle_all,
)
from retime.foundations.lazy_updates.optimizer_window import OptimizerWindow, nbytes
from retime.foundations.lazy_updates.per_parameter import (
    declare_per_parameter,
    is_fused_step,
    is_torchs_zero_grad,
    why_class_not_per_parameter,
    why_not_per_parameter,
    why_not_this_step,
    why_not_this_zero_grad,
)
from retime.foundations.lazy_updates.readers import (
    has_alias,
    is_compiled,
    settle_before_readers,
    unwatchable_parameters,
)
from retime.foundations.lazy_updates.replaced_method import ReplacedMethod
from retime.foundations.lazy_updates.watched_state import WatchedState, unwatch, watch

__all__ = [
    "OptimizerWindow",
    "PendingUpdate",
    "ReplacedMethod",
    "WatchedState",
    "can_wait",
    "declare_per_parameter",
    "gradient_of",
    "has_alias",
    "is_compiled",
    "is_fused_step",
    "is_pending",
    "is_torchs_zero_grad",
    "nbytes",
    "pending_of",
    "settle_all",
    "settle_before_readers",
    "unwatch",
    "unwatchable_parameters",
    "watch",
    "why_class_not_per_parameter",
    "why_not_per_parameter",
    "why_not_this_step",
    "why_not_this_zero_grad",
]
