"""Hooks on modules that stay behind when a module is copied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from retime.foundations.torch_private import forward_ad_level, graph_task_id, in_function_transform


class Hook:
    """Calls ``act`` with what a module's hook is given, but for the module; in a copy or a pickled module, nothing."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self._act is None or torch.compiler.is_compiling():
            return None
        return self._act(*given)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def is_special() -> bool:
    """Inside a backward pass (checkpointing recomputes there) or a function transform."""
    return graph_task_id() != -1 or in_function_transform() or forward_ad_level() >= 0
