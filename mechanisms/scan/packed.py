"""Sequences of different lengths, packed as torch.nn.utils.rnn.PackedSequence packs them."""

import torch
from torch import Tensor

from retime.mechanisms.scan.capture import capturing


class Packing:
    """Where each packed row lies among ``T`` steps and ``B`` sequences, longest first.

    Args:
        batch_sizes: how many sequences still run at each step: ``[T]``, int64, on the CPU.

    Raises:
        RuntimeError: while a CUDA graph is captured: its replays could not see other lengths.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        if capturing(device):
            raise RuntimeError(
                "packed sequences cannot be captured in a CUDA graph: where they end is copied from the host. Pad them "
                "to one length, or leave this layer out of the graph"
            )
        self.steps, self.batch = batch_sizes.shape[0], int(batch_sizes[0])
        running = torch.arange(self.batch).unsqueeze(0) < batch_sizes.unsqueeze(1)
        lengths = running.sum(0)
        steps = torch.arange(self.steps).unsqueeze(1)
        opposite = torch.where(running, lengths - 1 - steps, steps) * self.batch + torch.arange(self.batch)
        self._rows = running.flatten().nonzero().squeeze(1).to(device)
        self._last = ((lengths - 1) * self.batch + torch.arange(self.batch)).to(device)
        self._opposite = opposite.flatten().to(device)
        self._running = running.to(device)

    def pad(self, packed: Tensor) -> Tensor:
        """``[N, F]`` as ``[T, B, F]``, zero after each sequence's end."""
        padded = packed.new_zeros(self.steps * self.batch, packed.shape[-1])
        return padded.index_copy(0, self._rows, packed).view(self.steps, self.batch, -1)

    def pack(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` as ``[N, F]``: the inverse of :meth:`pad`."""
        return padded.flatten(0, 1).index_select(0, self._rows)

    def at_end(self, last: Tensor) -> Tensor:
        """A value a sequence, ``[B, F]``, put at its last step: ``[T, B, F]``, zero elsewhere."""
        series = last.new_zeros(self.steps * self.batch, last.shape[-1])
        return series.index_copy(0, self._last, last).view(self.steps, self.batch, -1)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """``[T, B, 1]``: one while a sequence runs, zero after its end."""
        return self._running.to(dtype).unsqueeze(-1)

    def flip(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` with every sequence from its last step to its first. Its own inverse."""
        return padded.flatten(0, 1).index_select(0, self._opposite).view_as(padded)

    def flip_packed(self, packed: Tensor) -> Tensor:
        """:meth:`flip` of packed data ``[N, F]``."""
        return self.pack(self.flip(self.pad(packed)))
