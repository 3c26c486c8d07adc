"""Private names of ``torch.optim`` and its kernels.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from retime.foundations.torch_private.missing import attribute, needed_by

__all__ = [
    "INIT_GROUP",
    "STEP_HOOKS",
    "foreach_add",
    "foreach_classes",
    "foreach_clamp_max",
    "foreach_clamp_min",
    "fused_adam_kernel",
    "fused_adamw",
    "global_step_hooks",
    "step_hooks",
]

_HOOKS = "fusion and the memory budget's dry run, which must see an optimizer's step hooks,"

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where an optimizer keeps its step hooks: attributes that are dictionaries."""

INIT_GROUP = "_init_group"
"""The method by which torch's optimizers collect parameters and make their state; forward fusion asks whose it is."""

_some = torch.optim.SGD([torch.empty(0, device="meta")])
attribute(_some, INIT_GROUP, "fusion, to tell torch's own optimizers from others,")

step_hooks: Callable[[Optimizer], tuple[dict[int, Any], ...]] = attribute(_some, STEP_HOOKS, _HOOKS)
"""What ``register_step_pre_hook`` and ``register_step_post_hook`` put on an optimizer."""

_global_hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
global_step_hooks: Callable[[], tuple[dict[int, Any], ...]] = partial(
    attribute(_optimizer, _global_hooks, _HOOKS), _optimizer
)
"""The hooks of all optimizers' steps; torch may bind them anew, so they are read by name at each call."""


with needed_by("backward fusion, to clip by value as torch does,"):
    foreach_clamp_min, foreach_clamp_max = torch._foreach_clamp_min_, torch._foreach_clamp_max_
"""Clamp lists of tensors in place: the kernels of ``torch.nn.utils.clip_grad_value_``."""

with needed_by("the recipe that measures where gradients lie"):
    fused_adamw = torch._fused_adamw_
"""The kernel of ``AdamW(fused=True)``."""

with needed_by("optimizer fusion, which calls the kernel of Adam(fused=True) bucket by bucket,"):
    foreach_add = torch._foreach_add_
    torch._fused_adam_, torch._fused_adamw_  # noqa: B018
"""Adds to each tensor of a list in place."""


def fused_adam_kernel(*, decoupled: bool) -> Callable[..., Any]:
    """The kernel of ``Adam(fused=True)``, or of ``AdamW(fused=True)`` where weight decay is ``decoupled``."""
    return torch._fused_adamw_ if decoupled else torch._fused_adam_


with needed_by("forward fusion, whose updates are to run by the kernels that optimizer.step() would choose,"):
    foreach_classes: list[Any] = _optimizer._foreach_supported_types
"""The exact classes of parameters for which optimizers choose multi-tensor kernels; others may be added."""
