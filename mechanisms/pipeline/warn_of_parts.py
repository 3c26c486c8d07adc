"""Layers that do something else with micro-batches than with a batch."""

from __future__ import annotations

from torch import Tensor, nn

from retime.foundations.no_effect import warn_difference
from retime.foundations.torch_private import BatchNormBase, tensor_hooks, version_of

__all__ = ["ChangedBuffers", "warn_of_gradient_hooks", "warn_of_parts"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def warn_of_parts(model: nn.Module, microbatches: int) -> None:
    """Say of layers that see parts of a batch that they do, and of those that draw random numbers; once each kind."""
    parts = microbatches > 1
    norms = [name for name, one in model.named_modules() if isinstance(one, BatchNormBase)]
    if norms and parts:
        warn_difference(
            f"{norms[0]!r} and other BatchNorm layers take their statistics from micro-batches under a pipeline, so "
            "training differs from that on one device: use microbatches=1, or another normalisation"
        )
    drops = [name for name, one in model.named_modules() if isinstance(one, _DROPOUT) and one.p]
    if drops:
        warn_difference(f"{drops[0]!r} and other dropout layers draw other masks under a pipeline than on one device")
    tables = [name for name, one in model.named_modules() if getattr(one, "scale_grad_by_freq", False)]
    if tables and parts:
        warn_difference(
            f"{tables[0]!r} divides gradients by how often a row was read (scale_grad_by_freq), in a micro-batch under "
            "a pipeline, so training differs from that on one device: use microbatches=1, or leave it out"
        )


def warn_of_gradient_hooks(model: nn.Module) -> None:
    """Say of hooks on parameters' gradients that they see those of micro-batches."""
    hooked = [name for name, one in model.named_parameters() if one.requires_grad and tensor_hooks(one)]
    if hooked:
        others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        warn_difference(
            f"{hooked[0]!r}{others} has a hook on its gradient (register_hook), which runs once a micro-batch under a "
            "pipeline, on that one's share: a hook that is not linear, such as a clamp, trains something else there. "
            "Use microbatches=1, or change gradients in on_before_optimizer_step"
        )


class ChangedBuffers:
    """Says which buffers a step changes, as spectral norms do: once a micro-batch, in place of once a batch.

    Args:
        model: before the step. BatchNorm's buffers do not count, of which :func:`warn_of_parts` tells.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._found()

    def warn(self) -> None:
        """After the step."""
        changed = [name for name, found in self._found().items() if found != self._before.get(name)]
        if changed:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warn_difference(
                f"the forward pass changes the buffer {changed[0]!r}{others}, and runs once a micro-batch under a "
                "pipeline, so training may differ from that on one device: use microbatches=1, or change it once a "
                "batch, in a hook",
                every_rank=True,
            )

    def _found(self) -> dict[str, tuple[int, int]]:
        """Which tensor a buffer is, and how often it was written in place."""
        norms = {f"{name}." for name, one in self._model.named_modules() if isinstance(one, BatchNormBase)}
        return {
            name: _identity(buffer)
            for name, buffer in self._model.named_buffers()
            if f"{name.rpartition('.')[0]}." not in norms
        }


def _identity(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), 0 if buffer.is_inference() else version_of(buffer)
