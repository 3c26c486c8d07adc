"""Why an update waits for ``optimizer.step()``, although its gradient is complete."""

from torch import Tensor

from retime.foundations.lazy_updates import has_alias
from retime.foundations.torch_private import post_accumulate_hooks

OTHER_HOOKS = (
    "with post-accumulate-grad hooks of others, which would find the gradient used up; remove the hooks, or use "
    "mode='forward'"
)
ALIASED = (
    "that share memory with another tensor or array (.data, .detach(), .numpy()), since backward may still need the "
    "old values through it and no version check would tell; drop the alias to fuse"
)


def why_unfused(parameter: Tensor) -> str | None:
    """What keeps this parameter from being updated inside of the backward pass, if anything does."""
    if _others_read(parameter):
        return OTHER_HOOKS
    return ALIASED if has_alias(parameter) else None


def _others_read(parameter: Tensor) -> bool:
    hooks = post_accumulate_hooks(parameter)
    return hooks is not None and len(hooks) > 1
