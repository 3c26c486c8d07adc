"""The operations of a step on a batch of any size, recorded without its values and without using memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.parts import loss_of
from retime.foundations.preserve_state import DryMode, ExternalTensors, fake, stand_ins, undisturbed
from retime.foundations.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    schema_of,
    without_dispatch_modes,
)
from retime.mechanisms.memory_budget.separability.flow import READS, Flow
from retime.mechanisms.memory_budget.separability.watch import NoDropout, is_random

__all__ = ["dry_flows"]


def dry_flows(step: Callable[[Any], Any], model: nn.Module, batches: Sequence[Any], reads: Sequence[Any]) -> list[Flow]:
    """Forward passes on fake tensors; nothing is left of them.

    How many rows an operation gives that chooses them by their values (a mask, ``unique``) is made up: one more than
    there are values, so that a number that follows from it is told from one that follows from the size of the batch.

    Args:
        reads: the values that the step has read when it was really run.

    Raises:
        Exception: whatever the step says to tensors without values.
    """
    mode = DryMode()
    replacement = fake(mode)
    parts = [replacement.batch(batch) for batch in batches]
    found = []
    with mode.open(), stand_ins(model, replacement), torch.random.fork_rng(devices=[]):
        outside = ExternalTensors(replacement.stand_ins)
        for part in parts:
            flow = Flow()
            with undisturbed(model, step), mode, outside.put_back_after(), torch.enable_grad():
                with _Seen(flow, reads) as seen, _WithoutValues(flow, seen):
                    flow.end(loss_of(step(part)))
                found.append(flow)
    for flow in found:
        flow.release()
    return found


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, and makes up what follows from values."""

    def __init__(self, flow: Flow, reads: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow
        self._reads = list(reads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = self._made_up(func, args, kwargs)
        self._flow.note(func, args, kwargs, result, is_random(func, args, kwargs))
        if schema_of(func).name.removeprefix("aten::") in READS and self._reads:
            self._reads.pop(0)
        return result

    def _made_up(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = schema_of(func).name.removeprefix("aten::")
        given = args[0]
        if name in READS:
            return self.instead_of(given)
        more = given.numel() + 1
        whole = {"dtype": torch.int64, "device": given.device}
        if name == "index":
            return func(given, [at for one in args[1] for at in _places(one)])
        if name == "nonzero":
            return torch.zeros(more, given.dim(), **whole)
        if name == "masked_select":
            return given.new_zeros(more)
        if name == "bincount":
            return torch.zeros(kwargs.get("minlength", args[2] if len(args) > 2 else 0) or more, **whole)
        if name == "repeat_interleave":
            return torch.zeros(more, **whole)
        if name in ("_unique2", "unique_consecutive", "_unique"):
            found = given.new_zeros(more), torch.zeros(given.shape, **whole), torch.zeros(more, **whole)
            return found[: len(schema_of(func).returns)]
        return func(*args, **kwargs)

    def instead_of(self, tensor: Tensor) -> Any:
        """What the step read there when it really ran, or any other value of that kind."""
        value = self._reads[0] if self._reads else None
        if isinstance(value, bool | int | float):
            return value
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


class _WithoutValues(NoDropout):
    def __init__(self, flow: Flow, seen: _Seen) -> None:
        super().__init__()
        self._flow, self._seen = flow, seen

    def dropped(self, given: Tensor) -> Tensor:
        return self._flow.drawn(given)

    def read_whole(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = args[0]
        if not isinstance(given, FakeTensor):
            return func(*args, **kwargs)
        self._flow.read(given)
        if not given.dim():
            return self._seen.instead_of(given)
        with without_dispatch_modes():
            return func(torch.zeros(given.shape, dtype=given.dtype), *args[1:], **kwargs)


def _places(chosen: Tensor | None) -> list[Tensor | None]:
    """Rows by their numbers instead of by truth values."""
    if chosen is None or chosen.dtype not in (torch.bool, torch.uint8):
        return [chosen]
    return [torch.zeros(chosen.numel() + 1, dtype=torch.int64, device=chosen.device)] * chosen.dim()
