"""Code that reads parameters where no torch function sees it, and what forward fusion does about each kind."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retime.foundations.lazy_updates.lazy import settle_all
from retime.foundations.torch_private import (
    has_compile_mark,
    storage_address,
    storage_use_count,
    without_subclass_functions,
)

_PICKS_A_KERNEL_BY_CLASS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""They ask ``has_torch_function`` of their weights and would choose another kernel while updates are pending."""


def unwatchable_parameters(model: nn.Module) -> set[Tensor]:
    """Parameters under compiled or scripted modules: their code reads memory directly, so their updates cannot wait."""
    found: set[Tensor] = set()
    for module in model.modules():
        if is_compiled(module):
            found.update(module.parameters())
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's forward is compiled or scripted."""
    return has_compile_mark(module) or isinstance(module, torch.jit.ScriptModule)


def has_alias(parameter: Tensor) -> bool:
    """Whether something else shares the parameter's memory: ``p.data``, a view or a NumPy array made earlier.

    A read through the alias could not be seen. The parameter and the handle used for counting hold the storage twice.
    """
    with without_subclass_functions():  # not a read
        storage = parameter.untyped_storage()
    return storage_use_count(storage_address(storage)) > 2 or (storage.device.type == "cpu" and storage.is_shared())


def settle_before_readers(model: nn.Module) -> list[RemovableHandle]:
    """Hook the modules whose forward may hand parameters to code that no torch function sees; returns the handles.

    torch's own layers need no hook. Somebody else's class may call a C extension with its parameters; a module with a
    ``forward`` of its own on the instance (graphed or wrapped callables) may read its whole subtree.
    """
    handles = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no Python hook; its parameters never wait
        whole = isinstance(module, _PICKS_A_KERNEL_BY_CLASS) or "forward" in module.__dict__
        own = next(module.parameters(recurse=False), None) is not None
        foreign = not type(module).__module__.startswith("torch.nn.")
        if whole or (own and foreign):
            handles.append(module.register_forward_pre_hook(_Settle(recurse=whole), prepend=True))
    return handles


class _Settle:
    """A pre-hook that brings a module's parameters up to date; a class, so that the model can still be pickled."""

    def __init__(self, *, recurse: bool) -> None:
        self._recurse = recurse

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        settle_all(module.parameters(recurse=self._recurse))
