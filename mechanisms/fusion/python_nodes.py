"""Graphs with nodes that are written in Python, and may run a backward pass of their own."""

from typing import Any

import torch
from torch import Tensor


def has_python_nodes(loss: Tensor) -> bool:
    """Whether the graph behind ``loss`` has a node of a ``torch.autograd.Function``."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
