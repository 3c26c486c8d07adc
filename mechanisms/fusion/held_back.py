"""Why an update waits for ``optimizer.step()``, although its gradient is complete."""

from torch import Tensor

from retime.mechanisms.torch_private import post_accumulate_hooks

OTHER_HOOKS = (
    "with post-accumulate-grad hooks of others, which would find the gradient used up; remove the hooks, or use "
    "mode='forward'"
)
ALIASED = (
    "that share memory with another tensor or array (.data, .detach(), .numpy()), since backward may still need the "
    "old values through it and no version check would tell; drop the alias to fuse"
)


def others_read(parameter: Tensor) -> bool:
    hooks = post_accumulate_hooks(parameter)
    return hooks is not None and len(hooks) > 1
