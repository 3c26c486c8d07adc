"""How parameters begin: as their modules say, from random numbers that depend on a module's name alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state import random_state, seed_torch, set_random_state
from retime.foundations.torch_private import own_buffers, own_parameters
from retime.mechanisms.pipeline.errors import PipelineError

__all__ = ["initial_buffers", "initial_values"]

_APART = 0x9E3779B97F4A7C15
"""Seeds of modules are this far apart, times a number of their names."""


def initial_values(
    model: nn.Module,
    names: Mapping[nn.Module, str],
    modules: Sequence[nn.Module],
    wanted: set[Tensor],
    seed: int,
    memory_for: Callable[[Tensor], Tensor],
) -> None:
    """Give parameters memory and values; other parameters of these modules, and random numbers, stay as they are.

    A module's own ``reset_parameters()`` says which, or the ``_init_weights(module)`` of a module around it, as
    transformers' models and others have it.

    Args:
        model: that the modules belong to.
        names: of all its modules.
        modules: those with the parameters, and all inside of them, outer ones first.
        wanted: the parameters.
        seed: of all values.
        memory_for: gives a tensor for the values of a parameter.

    Raises:
        PipelineError: nobody says how a parameter begins.
    """
    held = {p for module in modules for p in own_parameters(module).values() if p is not None}
    kept = {p: p.data for p in held if p not in wanted}
    for parameter in held:  # what is not wanted has a copy to write into
        parameter.data = memory_for(parameter).fill_(float("nan"))
    random = random_state()
    try:
        with torch.no_grad():
            for module in reversed(modules):  # what is inside first: an outer module may have the last word
                seed_torch((seed + _APART * zlib.crc32(names[module].encode())) % 2**63)
                for say in _who_says(model, names, module):
                    say(module)
                    if not _unknown(module, wanted):
                        break
    finally:
        set_random_state(random)
        for parameter, data in kept.items():
            parameter.data = data
    for module in modules:
        for key in _unknown(module, wanted):
            name = f"{names[module]}.{key}".lstrip(".")
            raise PipelineError(
                f"{name!r} is on the meta device, and nobody says how it begins: give {type(module).__name__} a "
                "reset_parameters() that sets its own parameters, or load a checkpoint with ckpt_path"
            )


def initial_buffers(model: nn.Module, names: Mapping[nn.Module, str], module: nn.Module) -> None:
    """Give the buffers of one module their values; its parameters stay as they are.

    Raises:
        PipelineError: nobody says how they begin.
    """
    said = _who_says(model, names, module)
    if not said:
        known = ", ".join(repr(key) for key in own_buffers(module))
        raise PipelineError(
            f"buffers of {names[module]!r} ({known}) are on the meta device, and nobody says how they begin: make them "
            f"with torch.device('cpu'), or give {type(module).__name__} a reset_parameters()"
        )
    own = [p for p in own_parameters(module).values() if p is not None]
    kept = [p.data for p in own]
    for parameter in own:  # to write into
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    random = random_state()
    try:
        with torch.no_grad():
            for say in said:
                say(module)
    finally:
        set_random_state(random)
        for parameter, data in zip(own, kept, strict=True):
            parameter.data = data


def _unknown(module: nn.Module, wanted: set[Tensor]) -> list[str]:
    """Names of the module's own parameters that still have no values."""
    return [key for key, p in own_parameters(module).items() if p is not None and p in wanted and bool(p.isnan().any())]


def _who_says(model: nn.Module, names: Mapping[nn.Module, str], module: nn.Module) -> list[Callable[[nn.Module], Any]]:
    """Those that may know how a module begins, the nearest around it first, and it itself last."""
    found: list[Callable[[nn.Module], Any]] = []
    parts = names[module].split(".") if names[module] else []
    for length in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:length]))
        say = getattr(around, "_init_weights", None)
        if callable(say):
            found.append(say)
            break
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    has_own = any(one is not None for one in (*own_parameters(module).values(), *own_buffers(module).values()))
    if callable(own) and has_own:
        found.append(lambda _: own())
    return found
