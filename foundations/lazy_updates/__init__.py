"""Updates that wait until somebody reads the parameter, by the user's own optimizer."""

from retime.foundations.lazy_updates.optimizers import (
    ReplacedMethod,
    declare_per_parameter,
    is_declared,
    is_fused_step,
    is_torchs_zero_grad,
    why_class_not_per_parameter,
    why_not_separable,
    why_not_this_step,
    why_not_this_zero_grad,
)
from retime.foundations.lazy_updates.pending import (
    OpaqueCalls,
    PartialOptimizer,
    PendingUpdate,
    WatchedState,
    aliased,
    apply_pending,
    check_bucket_bytes,
    default_bucket_bytes,
    flush_before_opaque_forward,
    gradient_of,
    is_compiled,
    is_pending,
    nbytes,
    parameters_of,
    pending_of,
    unwatch,
    unwatchable,
    unwatchable_parameters,
    watch,
)
