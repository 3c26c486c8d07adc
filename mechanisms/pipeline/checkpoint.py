"""Checkpoints of a model that lies on several ranks: one file, as of a plain Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from retime.mechanisms.pipeline.ownership import Ownership

__all__ = ["forget_absent", "whole_model_state", "whole_optimizer_state"]


def whole_model_state(model: nn.Module, state: dict[str, Any], owners: Ownership) -> dict[str, Any]:
    """A state dict with every rank's own values in it, on the first rank of the pipeline; all ranks call this."""
    owner_of = _first_names(model)
    mine = {
        owner_of.get(key, key): value.detach().cpu()
        for key, value in state.items()
        if isinstance(value, Tensor) and owners.counts_state(owner_of.get(key, key))
    }
    found = owners.gather(mine)
    if found is None:
        return state
    return type(state)((key, found.get(owner_of.get(key, key), value)) for key, value in state.items())


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter or buffer, its first: tied weights are sent once, and one tensor in the file too."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in named}


def whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any], owners: Ownership) -> dict[str, Any]:
    """An optimizer's state dict with every rank's own in it, on the first rank of the pipeline; all ranks call this."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {tensor: name for name, tensor in owners.parameters.items()}
    mine = {
        index: one
        for index, one in state["state"].items()
        if not isinstance(index, int) or owners.counts_state(names[parameters[index]])
    }
    found = owners.gather(mine)
    if found is None:
        return state
    return {**state, "state": dict(sorted(found.items(), key=lambda item: str(item[0]).rjust(12)))}


def forget_absent(optimizer: Optimizer, owners: Ownership) -> None:
    """Drop the state of parameters that lie on other ranks."""
    absent = {owners.parameters[name] for name in owners.absent}
    for parameter in [one for one in optimizer.state if one in absent]:
        del optimizer.state[parameter]
