"""Weight gradients that are computed in order and handed on later.

While the layer runs, stand-ins take the place of its parameters: leaves that share their memory. Autograd adds the
gradients up in the stand-ins, untouched by hooks; handing them on sends each once to its parameter, hooks and all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.out_of_order.layers import Layer


class StandIns:
    """The stand-ins of one layer, from its first call in a forward pass until its gradients are handed on."""

    def __init__(self, layer: Layer, on_gradient: Callable[[], None]) -> None:
        self.tensors: dict[Tensor, Tensor] = {}
        for parameter in layer.parameters:
            tensor = parameter.detach().requires_grad_()
            tensor.register_post_accumulate_grad_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]
            self.tensors[parameter] = tensor
        self._places = [
            (module, name, parameter)
            for module in layer.module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in self.tensors
        ]

    def put_in(self) -> None:
        """Let the layer's code find the stand-ins."""
        for module, name, parameter in self._places:
            module._parameters[name] = self.tensors[parameter]  # type: ignore[assignment]

    def take_out(self) -> None:
        """Give the layer its parameters back."""
        for module, name, parameter in self._places:
            if module._parameters.get(name) is self.tensors[parameter]:
                module._parameters[name] = parameter

    def hand_on(self, *, release: bool) -> int:
        """Send the gradients to the parameters; returns how many there were."""
        found = [(p, s.grad) for p, s in self.tensors.items() if s.grad is not None]
        if found:
            parameters: list[Any] = [parameter for parameter, _ in found]
            torch.autograd.backward(parameters, [gradient for _, gradient in found], inputs=parameters)
        for tensor in self.tensors.values():
            tensor.grad = None
            if release:
                # the model's graph may live on and with it the stand-in, which must not count as an alias
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return len(found)
