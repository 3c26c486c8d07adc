"""BatchNorm over the whole batch while the operators between its layers run a few samples at a time.

    operators = ChunkedOperators(model, sub_batch=4)
    loss = step(batch)          # the whole batch, as ever
    loss.backward()
    operators.remove()

Convolutions and linear layers treat each sample by itself, so they may run in chunks of the batch and write into one
output: the numbers are the same but for the order in which a weight gradient is summed. BatchNorm, and everything else,
sees the whole batch.

What this saves is what one operator needs beside its input and output: the workspace of a convolution algorithm, the
column matrix of a convolution by matrix product, copies into a blocked layout, casts to another precision. All of these
grow with the samples that run at once. What it does not save are the activations themselves: inputs, outputs and what
is kept for the backward pass stay as large as the batch. Where they set the peak, as they do without offloading in most
networks, chunks alone lower it by nothing; they are for budgets at which offloading has left one operator's own needs
as the largest. Elementwise layers need nothing but input and output, so there is nothing to gain from chunks.

Measured with float32 on one CPU core as the growth of the process in a forward and backward pass with everything
offloaded, in 8 chunks: a ResNet-18 without the pooling and stride of its first layers, 64 images of 32 x 32 pixels,
went from 139 to 113 MiB, since a convolution's copies into its blocked layout were the largest need. With them, 32
images of 128 x 128 pixels, it stayed at 139 MiB, and with bfloat16 autocast at 95 MiB: the first BatchNorm's backward
pass is the largest there, and needs its input and two gradients of the whole batch (against 67 MiB for a batch of 8).

To make that smaller, sub-batches would have to go from one BatchNorm layer to the next together, as the ranks of
SyncBatchNorm do, with what waits on the host. That is not done here: for smaller budgets choose ``"ghost"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retime.mechanisms.torch_private import ConvBase, ConvTransposeBase, conv_padding

__all__ = ["ChunkReport", "ChunkedOperators"]


@dataclass
class ChunkReport:
    """Counts since the operators were wrapped."""

    layers: int = 0
    """Convolutions and linear layers that are wrapped."""
    calls: int = 0
    """Calls that ran in chunks."""
    chunks: int = 0
    """Kernels' calls in their forward passes."""
    whole: dict[str, int] = field(default_factory=dict)
    """Calls that ran whole, by reason."""

    def __str__(self) -> str:
        text = f"{self.layers} operators wrapped, {self.calls} calls in {self.chunks} chunks"
        return text + "".join(f"; {count} calls whole because {reason}" for reason, count in self.whole.items())


class ChunkedOperators:
    """Lets the convolutions and linear layers of a model run ``sub_batch`` samples at a time.

    Args:
        model: its ``nn.Conv*``, ``nn.ConvTranspose*`` and ``nn.Linear`` layers are wrapped; subclasses with a
            ``forward`` of their own are not.
        sub_batch: samples in a chunk, of the first dimension of a layer's input.

    Forward hooks, parametrizations and autocast work as before. Gradients of gradients are refused by autograd.

    Raises:
        ValueError: ``sub_batch`` is below 1, or no layer can be wrapped.
    """

    def __init__(self, model: nn.Module, sub_batch: int) -> None:
        if sub_batch < 1:
            raise ValueError(f"sub_batch={sub_batch}: a chunk has 1 sample or more")
        self.sub_batch = sub_batch
        self._report = ChunkReport()
        self._wrapped: list[nn.Module] = []
        for module in model.modules():
            if "forward" not in module.__dict__ and type(module).forward in _KNOWN:
                self._wrap(module)
        if not self._wrapped:
            raise ValueError(
                "no convolution or linear layer to run in chunks: batchnorm='exact' cannot help this model"
            )
        self._report.layers = len(self._wrapped)

    def report(self) -> ChunkReport:
        return self._report

    def remove(self) -> None:
        """Let all layers run as before; may be called again."""
        for module in self._wrapped:
            del module.forward
        self._wrapped.clear()

    def _wrap(self, module: nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            value = args[0] if len(args) == 1 and not kwargs else None
            reason = self._why_whole(module, value)
            if reason is not None:
                self._report.whole[reason] = self._report.whole.get(reason, 0) + 1
                return type(module).forward(module, *args, **kwargs)
            assert isinstance(value, Tensor)
            self._report.calls += 1
            self._report.chunks += -(-len(value) // self.sub_batch)
            return _chunked(module, value, self.sub_batch)

        module.forward = forward
        self._wrapped.append(module)

    def _why_whole(self, module: nn.Module, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return "it has further arguments"
        dimensions = len(module.kernel_size) + 2 if isinstance(module, ConvBase) else 2
        if value.dim() < dimensions:
            return "its input has no batch dimension"
        if len(value) <= self.sub_batch:
            return "the batch is no larger than a chunk"
        if isinstance(module, ConvBase) and isinstance(module.padding, str) and not _is_even(module):
            return "padding='same' is uneven"
        return None


_KNOWN = {
    kind.forward
    for kind in (
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    )
}  # fmt: skip


def _is_even(module: ConvBase) -> bool:
    return module.padding == "valid" or all(
        dilation * (size - 1) % 2 == 0 for dilation, size in zip(module.dilation, module.kernel_size, strict=True)
    )


def _chunked(module: Any, value: Tensor, sub_batch: int) -> Tensor:
    weight, bias = module.weight, module.bias
    device = value.device.type
    cast: torch.dtype | None = None
    if torch.is_autocast_enabled(device) and value.is_floating_point() and value.dtype != torch.float64:
        cast = torch.get_autocast_dtype(device)
        weight = weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    with torch.autocast(device, enabled=False):
        if isinstance(module, nn.Linear):
            return _Chunks.apply(value, weight, bias, sub_batch, cast, _linear, _linear_backward)  # type: ignore[no-any-return,no-untyped-call]
        if module.padding_mode != "zeros":
            value = F.pad(value, conv_padding(module), mode=module.padding_mode)
        settings = _settings(module)

        def run(chunk: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.convolution(chunk, weight, bias, *settings)

        def back(gradient: Tensor, chunk: Tensor, weight: Tensor, sizes: list[int] | None, wanted: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(gradient, chunk, weight, sizes, *settings, wanted)

        return _Chunks.apply(value, weight, bias, sub_batch, cast, run, back)  # type: ignore[no-any-return,no-untyped-call]


def _settings(module: ConvBase) -> tuple[Any, ...]:
    """Stride, padding, dilation, transposed, output padding, groups, as ``torch.convolution`` takes them."""
    if module.padding_mode != "zeros" or module.padding == "valid":
        padding: Any = [0] * len(module.kernel_size)
    elif module.padding == "same":
        padding = [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    else:
        padding = list(module.padding)
    transposed = isinstance(module, ConvTransposeBase)
    return (
        list(module.stride), padding, list(module.dilation), transposed, list(module.output_padding), module.groups,
    )  # fmt: skip


def _linear(chunk: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(chunk, weight, bias)


def _linear_backward(
    gradient: Tensor, chunk: Tensor, weight: Tensor, sizes: list[int] | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient @ weight if wanted[0] else None,
        rows.T @ chunk.reshape(-1, chunk.shape[-1]) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


class _Chunks(torch.autograd.Function):
    """An operator that treats samples one by one, run on a few at a time into one output."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sub_batch: int,
        cast: torch.dtype | None,
        run: Callable[..., Tensor],
        back: Callable[..., Any],
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.sub_batch, ctx.cast, ctx.back = sub_batch, cast, back
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        output: Tensor | None = None
        for start in range(0, len(value), sub_batch):
            made = run(_cast(value[start : start + sub_batch], cast), weight, bias)
            if output is None:
                output = _like(made, len(value))
            output[start : start + sub_batch] = made
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
        whole = torch.empty_like(value) if wanted[0] else None
        sums: list[Tensor | None] = [None, None]
        for start in range(0, len(value), ctx.sub_batch):
            rows = slice(start, start + ctx.sub_batch)
            found = ctx.back(gradient[rows], _cast(value[rows], ctx.cast), weight, ctx.bias_sizes, wanted)
            if whole is not None:
                whole[rows] = found[0]
            for index, part in enumerate(found[1:]):
                if wanted[index + 1]:
                    known = sums[index]
                    sums[index] = part if known is None else known.add_(part)
        return whole, sums[0], sums[1], None, None, None, None


def _cast(chunk: Tensor, dtype: torch.dtype | None) -> Tensor:
    return chunk if dtype is None else chunk.to(dtype)


def _like(made: Tensor, samples: int) -> Tensor:
    """Memory for the whole output, in the layout of the first chunk's."""
    shape = (samples, *made.shape[1:])
    if made.dim() == 4 and made.is_contiguous(memory_format=torch.channels_last) and not made.is_contiguous():
        return made.new_empty(shape).contiguous(memory_format=torch.channels_last)
    return made.new_empty(shape)
