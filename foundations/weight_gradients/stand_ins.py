"""Weight gradients that are computed in order and handed on later.

While the layer runs, stand-ins take the place of its parameters: leaves that share their memory. Autograd adds the
gradients up in the stand-ins, untouched by hooks; handing them on sends each once to its parameter, hooks and all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from retime.foundations.torch_private import graph_task_id, own_parameters, will_execute
from retime.foundations.weight_gradients.layers import Layer


class StandIns:
    """The stand-ins of one layer in one pass, from its first call until no backward pass can come any more.

    Args:
        layer: whose parameters they stand for.
        on_gradient: called in the backward pass, behind each gradient that one of them gets.
    """

    def __init__(self, layer: Layer, on_gradient: Callable[[], None]) -> None:
        self._on_gradient = on_gradient
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Parameters and their stand-ins."""
        self._now: dict[Tensor, Tensor] = {}
        self._arrived: dict[int, dict[Tensor, Tensor]] = {}
        """Of each backward pass that was not handed on yet: gradients by stand-in."""
        mine = set(layer.parameters)
        self._places = [
            (module, name, parameter)
            for module in layer.module.modules()
            for name, parameter in own_parameters(module).items()
            if parameter is not None and parameter in mine
        ]

    def put_in(self) -> None:
        """Let the layer's code find the stand-ins; a frozen parameter needs none."""
        for module, name, parameter in self._places:
            if parameter.requires_grad:
                own_parameters(module)[name] = self._of(parameter)

    def _of(self, parameter: Tensor) -> Tensor:
        tensor = self._now.get(parameter)
        if tensor is None or not tensor.is_set_to(parameter):  # somebody may have given it other memory
            tensor = self._now[parameter] = parameter.detach().requires_grad_()
            tensor.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            self._pairs.append((parameter, tensor))
        return tensor

    def _take(self, tensor: Tensor) -> None:
        gradient, tensor.grad = tensor.grad, None
        assert gradient is not None
        self._arrived.setdefault(graph_task_id(), {})[tensor] = gradient
        self._on_gradient()

    def take_out(self) -> None:
        """Give the layer its parameters back."""
        for module, name, parameter in self._places:
            if parameter in self._now and own_parameters(module).get(name) is self._now[parameter]:
                own_parameters(module)[name] = parameter

    def run_now(self) -> bool:
        """Whether the running backward pass brings one of them a gradient."""
        return any(will_execute(get_gradient_edge(s).node) for _, s in self._pairs)

    def is_torn(self) -> bool:
        """Whether the running backward pass brings a parameter gradients beside those of its stand-in."""
        return any(
            will_execute(get_gradient_edge(s).node) and will_execute(get_gradient_edge(p).node) for p, s in self._pairs
        )

    @property
    def backwards(self) -> list[int]:
        """The backward passes whose gradients wait, by autograd's number of each."""
        return list(self._arrived)

    def hand_on(self, backward: int) -> bool:
        """Send one backward pass's gradients to the parameters; returns whether there were any."""
        arrived = self._arrived.pop(backward, {})
        found = [(p, arrived[s]) for p, s in self._pairs if s in arrived and p.requires_grad]
        if found:
            parameters: list[Any] = [parameter for parameter, _ in found]
            torch.autograd.backward(parameters, [gradient for _, gradient in found], inputs=parameters)
        return bool(found)

    def drop(self, backward: int) -> None:
        """Forget one backward pass's gradients."""
        self._arrived.pop(backward, None)

    def release(self) -> None:
        """No backward pass comes any more. The graph may live on and with it the stand-ins: no alias must be left."""
        for _, tensor in self._pairs:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._pairs.clear()
        self._now.clear()
