"""Turns the `_target_` blocks of a configuration into models, batches and optimizers, with errors that say the fix."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

CPU = torch.device("cpu")


def build(block: dict[str, Any], **more: Any) -> Any:
    """Call what `block["_target_"]` names with the block's other entries and `more`.

    Raises:
        ValueError: the block names no target, or the target does not take these arguments.
    """
    if "_target_" not in block:
        raise ValueError(f"{block} has no _target_: name a function or class, as in _target_=retime.recipes.models.mlp")
    target = get_object(block["_target_"])
    arguments = {key: value for key, value in block.items() if not key.startswith("_")}
    try:
        inspect.signature(target).bind(*block.get("_args_", ()), **arguments, **more)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(target).parameters)
        raise ValueError(
            f"{block['_target_']}({accepted}): {error}. Set an argument with <block>.<name>=<value>, take "
            "one away with '~<block>.<name>'"
        ) from None
    return instantiate(block, **more, _convert_="all")


def build_model(block: dict[str, Any], device: torch.device, seed: int) -> nn.Module:
    """The model with weights that depend on `seed` alone, on `device`; a plain one in training mode."""
    torch.manual_seed(seed)
    model = build(block)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{block['_target_']} returned a {type(model).__name__}, not an nn.Module")
    return model.to(device) if isinstance(model, LightningModule) else model.to(device).train()


def build_batches(
    block: dict[str, Any], batch_size: int, count: int, device: torch.device = CPU, own: slice = slice(None)
) -> list[tuple[Tensor, Tensor]]:
    """The first `count` batches of a data set of `(input, target)` pairs, on `device`; it starts again at its end.

    Only those of `own` are made, as a rank needs them: `slice(rank, None, ranks)`.
    """
    data = build(block)
    numbers = (range(batch * batch_size, (batch + 1) * batch_size) for batch in range(count)[own])
    batches = (default_collate([data[number % len(data)] for number in batch]) for batch in numbers)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def saved_batch(case: dict[str, Any], folder: Path) -> str:
    """Write a case's batch to a file for other processes: its tensors alone, without the data set they are cut from."""
    (batch,) = build_batches(case["data"], case["batch_size"], 1)
    place = folder / "batch.pt"
    torch.save(tuple(tensor.clone() for tensor in batch), place)
    return str(place)


def build_optimizer(
    block: dict[str, Any], parameters: Iterable[nn.Parameter], flags: dict[str, bool]
) -> torch.optim.Optimizer:
    """The optimizer over `parameters` with kernel flags such as `{"fused": True}` added.

    Raises:
        KernelUnavailable: this optimizer has no such kernel, or not on these parameters' device.
    """
    target = get_object(block["_target_"])
    missing = [flag for flag in flags if flag not in inspect.signature(target).parameters]
    if missing:
        raise KernelUnavailable(f"{target.__name__} takes no {missing[0]}=")
    try:
        optimizer = build(block, params=list(parameters), **flags)
    except RuntimeError as error:
        raise KernelUnavailable(f"{target.__name__}: {error}") from None
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


class KernelUnavailable(Exception):  # noqa: N818 -- an answer, not a failure: the variant is left out with this reason
    """The optimizer has no such kernel here."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits `(..., classes)` and class numbers `(...)`; image maps have classes in dimension 1."""
    if outputs.dim() == 4:
        return cross_entropy(outputs, targets)
    return cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
