"""Models on the meta device: parameters that take no memory until a rank knows that it needs them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state import random_state, seed_torch, set_random_state
from retime.foundations.torch_private.nn_and_optim import own_buffers, own_parameters
from retime.mechanisms.pipeline.checks import PipelineError

# How parameters begin: as their modules say, from random numbers that depend on a module's name alone.

_APART = 0x9E3779B97F4A7C15
"""Seeds of modules are this far apart, times a number of their names."""


@contextmanager
def _kept_apart(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, values are given without a graph; these parameters, and random numbers, are afterwards as they were."""
    kept, random = {p: p.data for p in parameters}, random_state()
    try:
        with torch.no_grad():
            yield
    finally:
        set_random_state(random)
        for parameter, data in kept.items():
            parameter.data = data


def _unknown(module: nn.Module, wanted: set[Tensor]) -> list[str]:
    """Names of the module's own parameters that still have no values."""
    return [key for key, p in own_parameters(module).items() if p is not None and p in wanted and bool(p.isnan().any())]


def is_on_meta(model: nn.Module) -> bool:
    """Return whether parameters of a model are on the meta device."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def load_into_meta(model: nn.Module, values: Mapping[str, Tensor], strict: bool) -> None:
    """Let values be a model's parameters and buffers, in place of those on the meta device; tied weights stay tied.

    Raises:
        RuntimeError: names or shapes that do not fit, as of ``load_state_dict``.
    """
    places: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    model.load_state_dict(values, strict=strict, assign=True)
    for first, *others in places.values():
        parameter = model.get_parameter(first)
        for name in others:
            path, _, key = name.rpartition(".")
            own_parameters(model.get_submodule(path))[key] = parameter


class DeferredInitModel:
    """Gives a model that was built on the meta device parameters, and these their values layer by layer.

    All parameters are on the device from now on, for an optimizer to hold, and have neither values nor memory. Those of
    a module come with :meth:`fill`, or :meth:`filled` for a while. They are the same bits on all ranks, any number of
    them, and whenever they are asked for. A parameter of several modules is given its value by the first of them.

    Args:
        model: built under ``torch.device("meta")``.
        device: of the model from now on.
        seed: of the initial values, the same on all ranks.

    Raises:
        PipelineError: a module does not say how its parameters or buffers begin.
    """

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._model, self._seed = model, seed
        self._names = {module: name for name, module in model.named_modules()}
        self._owner: dict[Tensor, nn.Module] = {}
        self._filled: set[Tensor] = set()
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        """Memory of parameters that had values for a while: allocators may not give the same twice."""
        with_memory: dict[Tensor, nn.Parameter] = {}
        with_buffers: list[nn.Module] = []
        for module in model.modules():
            for key, parameter in list(own_parameters(module).items()):
                if parameter is None or parameter.device.type != "meta":
                    continue
                if parameter not in with_memory:
                    with_memory[parameter] = nn.Parameter(
                        without_memory(parameter, device), requires_grad=parameter.requires_grad
                    )
                    self._owner[with_memory[parameter]] = module
                own_parameters(module)[key] = with_memory[parameter]
            for key, buffer in list(own_buffers(module).items()):
                if buffer is not None and buffer.device.type == "meta":
                    own_buffers(module)[key] = torch.zeros_like(buffer, device=device)
                    with_buffers.append(module)
        for module in with_buffers:
            self._set_buffers(module)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters that were on the meta device."""
        return list(self._owner)

    def fill(self, module: nn.Module) -> None:
        """Give the parameters of a module and of all inside of it their memory and initial values."""
        self._fill(list(module.modules()))

    def fill_outside(self, layers: Iterable[nn.Module]) -> None:
        """Likewise those of all modules that are in none of these.

        Raises:
            PipelineError: a layer's parameter is used outside of it, where it would have no values.
        """
        every = [one for one in self._model.modules() if any(p is not None for p in own_parameters(one).values())]
        outside = every
        for layer in layers:
            inside, owned = set(layer.modules()), self._owned(layer.modules())
            for one in every:
                tied = [p for p in own_parameters(one).values() if p in owned and one not in inside]
                if tied:
                    raise PipelineError(
                        f"{self._names[one]!r} has a weight of {self._names[layer]!r}, and both are on the meta "
                        "device, where a layer has values only while it runs: build the module with values"
                    )
            outside = [one for one in outside if one not in inside]
        self._fill(outside)

    @contextmanager
    def filled(self, layer: nn.Module, *, again: bool = True) -> Iterator[None]:
        """Inside, a layer has its values; afterwards their memory is used ``again``, by others."""
        before = set(self._filled)
        self.fill(layer)
        try:
            yield
        finally:
            for parameter in self._filled - before:
                if again:
                    self._spare.setdefault((parameter.shape, parameter.dtype), []).append(parameter.data)
                parameter.data = without_memory(parameter, parameter.device)
            self._filled = before

    def keep(self, layers: Sequence[nn.Module], wanted: set[Tensor]) -> None:
        """Give the layers that have one of these parameters their values for good."""
        for layer in layers:
            if self._owned(layer.modules()) & wanted - self._filled:
                self.fill(layer)
        self._spare.clear()

    def _fill(self, modules: list[nn.Module]) -> None:
        """Give parameters memory and values; other parameters of these modules, and random numbers, stay as they are.

        A module's own ``reset_parameters()`` says which, or the ``_init_weights(module)`` of a module around it, as
        transformers' models and others have it.

        Args:
            modules: those with the parameters, and all inside of them, outer ones first.

        Raises:
            PipelineError: nobody says how a parameter begins.
        """
        wanted = self._owned(modules) - self._filled
        if not wanted:
            return
        parameters = {p for module in modules for p in own_parameters(module).values() if p is not None}
        with _kept_apart(parameters - wanted):
            for parameter in parameters:  # what is not wanted has a copy to write into
                spare, kind = self._spare.get((parameter.shape, parameter.dtype)), parameter.dtype
                data = spare.pop() if spare else torch.empty(parameter.shape, dtype=kind, device=parameter.device)
                parameter.data = data.fill_(float("nan"))
            for module in reversed(modules):  # what is inside first: an outer module may have the last word
                seed_torch((self._seed + _APART * zlib.crc32(self._names[module].encode())) % 2**63)
                for say in self._who_says(module):
                    say(module)
                    if not _unknown(module, wanted):
                        break
        for module in modules:
            for key in _unknown(module, wanted):
                name = f"{self._names[module]}.{key}".lstrip(".")
                raise PipelineError(
                    f"{name!r} is on the meta device, and nobody says how it begins: give {type(module).__name__} a "
                    "reset_parameters() that sets its own parameters, or load a checkpoint with ckpt_path"
                )
        self._filled |= wanted

    def _set_buffers(self, module: nn.Module) -> None:
        """Give the buffers of one module their values; its parameters stay as they are.

        Raises:
            PipelineError: nobody says how they begin.
        """
        initialisers = self._who_says(module)
        if not initialisers:
            keys = ", ".join(repr(key) for key in own_buffers(module))
            raise PipelineError(
                f"buffers of {self._names[module]!r} ({keys}) are on the meta device, and nobody says how they begin: "
                f"make them with torch.device('cpu'), or give {type(module).__name__} a reset_parameters()"
            )
        own = {p for p in own_parameters(module).values() if p is not None}
        with _kept_apart(own):
            for parameter in own:  # to write into
                parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for initialise in initialisers:
                initialise(module)

    def _who_says(self, module: nn.Module) -> list[Callable[[nn.Module], Any]]:
        """Return what may give a module its initial values, the nearest module around it first, and it itself last."""
        initialisers: list[Callable[[nn.Module], Any]] = []
        name = self._names[module]
        parts = name.split(".") if name else []
        for length in range(len(parts), -1, -1):
            say = getattr(self._model.get_submodule(".".join(parts[:length])), "_init_weights", None)
            if callable(say):
                initialisers.append(say)
                break
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        has_own = any(one is not None for one in (*own_parameters(module).values(), *own_buffers(module).values()))
        if callable(own) and has_own:
            initialisers.append(lambda _: own())
        return initialisers

    def _owned(self, modules: Iterable[nn.Module]) -> set[Tensor]:
        """The parameters that these are the first to have."""
        return {
            p for one in modules for p in own_parameters(one).values() if p is not None and self._owner.get(p) is one
        }


def without_memory(parameter: Tensor, device: torch.device) -> Tensor:
    """Not a number in this shape, without memory: whoever reads it shows."""
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)
