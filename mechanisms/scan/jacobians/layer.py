"""What is known about one layer: the pattern of its transposed Jacobian and how an iteration fills it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from retime.mechanisms.scan.jacobians.pattern import CsrPattern


class UnknownJacobian(ValueError):  # noqa: N818 -- an answer, not a failure: callers fall back
    """No analytic Jacobian for this layer or input shape; the text says why."""


class LayerJacobian(ABC):
    """The transposed Jacobian ``(dy/dx)^T`` of a layer, for one shape of its input.

    Attributes:
        pattern: inputs by outputs of one sample, both flattened in row-major order. Built once.
        is_identity: the values never change and are ones on the diagonal (flatten): a scan leaves the layer out.
    """

    pattern: CsrPattern
    is_identity = False

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call the layer on ``(B, ...)``; its outputs, and what `values` needs of this iteration."""
        outputs = layer(inputs)
        assert isinstance(outputs, Tensor)
        return outputs, self.saved(layer, inputs)

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors that `values` reads."""
        return ()

    @abstractmethod
    def values(self, *saved: Tensor) -> Tensor:
        """The entries' values ``(entries, S)``; S is 1 if they are the same for all samples."""

    def still_fits(self, layer: nn.Module) -> bool:
        """Whether the pattern is still right; it is not once the layer has been pruned further."""
        return True

    def move(self, device: torch.device) -> None:
        """Put the pattern, and what else was built once, on the device of the layer."""
        self.pattern = self.pattern.to(device)
