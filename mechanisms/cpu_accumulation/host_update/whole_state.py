"""The state of an optimizer, put together of the parts that ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.cpu_accumulation.host_update.exchange import SENT_ALONE_BYTES, broadcast, shown
from retime.mechanisms.cpu_accumulation.shared_memory import SharedSum

__all__ = ["state_bytes", "whole_state"]

_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Coming:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def whole_state(part: dict[int, Any], ranks: SharedSum, *, keep: bool) -> dict[int, Any]:
    """All ranks' states, by the parameter's number; large tensors go one by one, so that nobody needs twice the memory.

    Args:
        part: of this rank; no number is in two ranks' parts.
        ranks: all of them call this.
        keep: whether to return the whole here; else ``part`` comes back.
    """
    whole = dict(part)
    for root in range(ranks.ranks):
        sends = root == ranks.rank
        told = shown(
            {number: _mapped(state, _described) for number, state in part.items()} if sends else None, root, ranks
        )
        for number in told:
            if sends:
                for tensor in _tensors(part[number]):
                    if _is_sent(tensor):
                        broadcast([tensor], root, ranks)
                continue
            state = _mapped(told[number], lambda one, root=root: _received(one, root, ranks))  # type: ignore[misc]
            if keep:
                whole[number] = state
    return {number: whole[number] for number in sorted(whole)}


def state_bytes(state: Any) -> int:
    """Of the tensors in one parameter's state."""
    return sum(one.nbytes for one in _tensors(state))


def _is_sent(tensor: Tensor) -> bool:
    """Whether it goes by itself: large, and laid out so that another rank can make one like it."""
    if tensor.layout is not torch.strided or tensor.dtype not in _SENT or tensor.nbytes < SENT_ALONE_BYTES:
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _is_sent(value):
        return value.detach().clone()  # without the rest of the storage that it is a view of
    return _Coming(tuple(value.shape), value.stride(), value.dtype)


def _received(value: Any, root: int, ranks: SharedSum) -> Any:
    if not isinstance(value, _Coming):
        return value
    tensor = value.empty()
    broadcast([tensor], root, ranks)
    return tensor


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with ``change`` of what is in it, in its order."""
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change) for one in value)
    return change(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """In the order in which :func:`_mapped` meets them."""
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (list, tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Tensor):
        yield value
