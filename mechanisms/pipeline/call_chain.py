"""Where a model without a list of layers can be cut: the modules that a step calls, one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.lazy_updates import nbytes
from retime.foundations.parts import loss_of
from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.pipeline.find_layers import LEAST_SHARE, LayerList
from retime.mechanisms.pipeline.ownership import Reached
from retime.mechanisms.pipeline.values import tensors_in_order

__all__ = ["call_chain"]


@dataclass(eq=False)
class _Call:
    name: str
    module: nn.Module
    inner: list[_Call] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.module.parameters()))


def call_chain(model: nn.Module, run: Callable[[], Any], ranks: int) -> LayerList:
    """The modules with parameters that a step calls once each, in the order of their calls.

    A module that holds more than a rank's equal share is taken apart into those that it calls itself; one that is
    called twice, or that the loss does not use (a second head), is no layer, and counts as what runs between them.

    Args:
        model: to be cut.
        run: the step; it runs twice, in training and in evaluation mode, which have to call the same modules.
        ranks: each of which gets one layer or more.

    Raises:
        PipelineError: there are fewer such modules than ranks, or they hold less than half of the model.
    """
    calls, output = _calls_of(model, run)
    used = Reached(_losses(output)).leaves
    unused = {p for p in model.parameters() if p.requires_grad and p not in used} if used else set()
    del output
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            evaluated = list(_all(_calls_of(model, run)[0]))
    finally:
        for module, training in modes.items():
            module.training = training
    times = Counter(call.name for call in _all(calls))
    inside = {call.name: [one.name for one in call.inner] for call in evaluated}
    order = [call.name for call in evaluated]

    def opens(call: _Call) -> bool:
        here = [one.name for one in call.inner]
        return times[call.name] == 1 and inside.get(call.name) == here and any(one.nbytes for one in call.inner)

    def is_layer(call: _Call) -> bool:
        once = times[call.name] == order.count(call.name) == 1
        some_used = not unused.issuperset(call.module.parameters())
        return once and some_used and call.nbytes > 0 and not isinstance(call.module, torch.jit.ScriptModule)

    total = sum(nbytes(p) for p in model.parameters() if p not in unused)
    chain = calls
    while largest := max(filter(opens, chain), key=lambda call: call.nbytes, default=None):
        if sum(map(is_layer, chain)) >= ranks and largest.nbytes * ranks <= total:
            break
        place = chain.index(largest)
        chain = [*chain[:place], *largest.inner, *chain[place + 1 :]]
    layers = [call for call in chain if is_layer(call)]
    names = [call.name for call in layers]
    held = sum(nbytes(p) for p in {p for call in layers for p in call.module.parameters()})
    if len(layers) < ranks or held < LEAST_SHARE * total or [name for name in order if name in names] != names:
        known = ", ".join(map(repr, names)) or "none"
        raise PipelineError(
            f"the model has no Sequential or ModuleList of {ranks} layers or more with half of its parameters, and the "
            f"step does not call {ranks} modules or more with half of them, each once and in the same order in "
            f"training and evaluation (it does: {known}): put the layers into an nn.Sequential, or name the list with "
            "layers='path.to.it'"
        )
    return LayerList("modules in the order of their calls", [call.module for call in layers], names)


def _losses(output: Any) -> list[Tensor]:
    try:
        return [loss_of(output)]
    except ValueError:  # which the first batch tells of
        return tensors_in_order(output)


def _calls_of(model: nn.Module, run: Callable[[], Any]) -> tuple[list[_Call], Any]:
    """What the step calls, and what that calls in turn; and what it returns."""
    names = {module: name for name, module in model.named_modules()}
    calls: list[_Call] = []
    open_calls = [calls]

    def enter(module: nn.Module, _: Any) -> None:
        call = _Call(names[module], module)
        open_calls[-1].append(call)
        open_calls.append(call.inner)

    def leave(*_: Any) -> None:
        open_calls.pop()

    handles = [module.register_forward_pre_hook(enter, prepend=True) for module in names]
    handles += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    return calls, output


def _all(calls: list[_Call]) -> Iterator[_Call]:
    for call in calls:
        yield call
        yield from _all(call.inner)
