"""What a run leaves behind, and the comparison of two such records, bit for bit unless a tolerance is given."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHOWN = 8
"""Differences printed before the rest is only counted."""


@dataclass
class Record:
    """Everything one scenario left behind under one row, on one rank."""

    entries: dict[str, Any] = field(default_factory=dict)
    fused_updates: list[int] = field(default_factory=list)
    """One number a fit of the row's own trainer: the updates its mechanism made."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why the mechanism let steps run plainly, and how often."""
    own_warnings: list[str] = field(default_factory=list)
    """Texts of the NoEffectWarnings and DifferenceWarnings that were shown."""


class Refusal(str):
    """The error of a run that its row has to refuse: as text, from a rank."""

    __slots__ = ()


def snapshot(value: Any, folder: Path | None = None) -> Any:
    """Copy `value` into plain containers and fresh tensors; `folder` is cut out of strings (each run has its own)."""
    if isinstance(value, Tensor):
        return value.detach().to_dense().clone() if value.is_sparse else value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item, folder) for item in value]
    if isinstance(value, str | Path):
        return str(value) if folder is None else str(value).replace(str(folder), "<folder>")
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return value
    # Anything else (an enum, a scheduler inside a scheduler) is compared by its type and its own state.
    return {"type": type(value).__qualname__, "state": snapshot(getattr(value, "__dict__", str(value)), folder)}


OWN_KEYS = "retime_"
"""Beginning of the checkpoint keys that strategies add for themselves; a plain Trainer passes over them."""


def differences(plain: Any, ours: Any, tolerance: float = 0.0, path: str = "") -> Iterator[str]:
    """Yield one line for each place where `ours` is not `plain`."""
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        if why := _tensor_difference(plain, ours, tolerance):
            yield f"{path}: {why}"
    elif isinstance(plain, dict) and isinstance(ours, dict):
        for key in plain.keys() | ours.keys():
            if str(key).startswith(OWN_KEYS) and key not in plain:
                continue
            if key not in ours or key not in plain:
                yield f"{path}/{key}: only the {'plain' if key in plain else 'retimed'} run has it"
            else:
                yield from differences(plain[key], ours[key], tolerance, f"{path}/{key}")
    elif isinstance(plain, list) and isinstance(ours, list):
        if len(plain) != len(ours):
            yield f"{path}: {len(plain)} items, retimed {len(ours)}"
        for index, (left, right) in enumerate(zip(plain, ours, strict=False)):
            yield from differences(left, right, tolerance, f"{path}/{index}")
    elif isinstance(plain, float) and isinstance(ours, float):
        if why := _tensor_difference(_double(plain), _double(ours), tolerance):
            yield f"{path}: {why}"
    elif type(plain) is not type(ours) or plain != ours:
        yield f"{path}: {plain!r}, retimed {ours!r}"


def assert_same_run(plain: Record, ours: Record, tolerance: float = 0.0) -> None:
    """Raise an AssertionError that lists where the two runs differ (`tolerance` 0 compares the bits)."""
    differing = sorted(differences(plain.entries, ours.entries, tolerance))
    if differing:
        more = [f"... and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        raise AssertionError("the retimed run differs from the plain one:\n  " + "\n  ".join(differing[:SHOWN] + more))


def without(record: Record, part: str | None) -> Record:
    """The record, but for one part of each of its fits, or one beside them, or but for everything."""
    if part is None:
        return record
    if part == "everything":
        return Record()
    return Record({name: _less(entry, part) for name, entry in record.entries.items() if name != part})


def _less(entry: Any, part: str) -> Any:
    return {key: value for key, value in entry.items() if key != part} if isinstance(entry, dict) else entry


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _tensor_difference(plain: Tensor, ours: Tensor, tolerance: float) -> str:
    if (plain.dtype, plain.shape) != (ours.dtype, ours.shape):
        return f"{plain.dtype} {list(plain.shape)}, retimed {ours.dtype} {list(ours.shape)}"
    if tolerance and plain.is_floating_point():
        same = torch.allclose(plain, ours, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        same = torch.equal(_bits(plain), _bits(ours))  # the bits: NaN equals NaN, and 0.0 is not -0.0
    if same:
        return ""
    gap = (plain.double() - ours.double()).abs()
    return f"off by {gap.max().item():.3g} in {int((gap != 0).sum())} of {gap.numel()} values"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
