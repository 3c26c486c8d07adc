"""Sequences of different lengths, packed as torch.nn.utils.rnn.PackedSequence packs them."""

import torch
from torch import Tensor


class Packing:
    """Where each packed row lies among ``T`` steps and ``B`` sequences, longest first.

    :param batch_sizes: how many sequences still run at each step: ``[T]``, int64, on the CPU.
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device) -> None:
        self.steps, self.batch = batch_sizes.shape[0], int(batch_sizes[0])
        running = torch.arange(self.batch).unsqueeze(0) < batch_sizes.unsqueeze(1)
        self._rows = running.flatten().nonzero().squeeze(1).to(device)
        self._lengths = running.sum(0).to(device)
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
        where = (self._lengths - 1) * self.batch + torch.arange(self.batch, device=last.device)
        return series.index_copy(0, where, last).view(self.steps, self.batch, -1)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """``[T, B, 1]``: one while a sequence runs, zero after its end."""
        return self._running.to(dtype).unsqueeze(-1)

    def reverse(self, packed: Tensor) -> Tensor:
        """Every sequence from its last step to its first; the packing stays the same. Its own inverse."""
        steps = torch.arange(self.steps, device=packed.device).unsqueeze(1)
        opposite = (self._lengths - 1 - steps).clamp_min(0)
        index = packed.new_zeros(self.steps * self.batch, dtype=torch.int64)
        index[self._rows] = torch.arange(len(self._rows), device=packed.device)
        columns = torch.arange(self.batch, device=packed.device)
        return packed.index_select(0, self.pack(index[opposite * self.batch + columns].unsqueeze(-1)).squeeze(-1))
