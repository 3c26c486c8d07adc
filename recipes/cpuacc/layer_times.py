"""Backward passes of a network with a sum a layer beside them, as DDP starts them, and where each sum's time goes.

Sekiyama et al. 2017, Algorithms 5 to 7: each tensor has a bucket of its own, so no layer waits for another one's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer, TimedSum
from retime.recipes.core.build import loss_of

__all__ = ["ADD", "BACKWARD", "BRING", "EXPOSED", "QUANTITIES", "TAKE", "WAIT", "LayerTimes", "of_pass"]

BACKWARD, BRING, ADD, TAKE, WAIT, EXPOSED = "backward", "bring", "accumulate", "take back", "wait", "exposed"
QUANTITIES = (BACKWARD, BRING, ADD, TAKE, WAIT, EXPOSED)
_ONE_BYTE_MB = 1e-6


class LayerTimes:
    """Backward passes, with sums beside them or without; all ranks call the same.

    Args:
        model: its layers' own parameters are used in the order of its modules.
        batch: inputs ``(B, ...)`` and targets ``(B,)``.

    Attributes:
        layers: name and number of parameters of each, in the order of the backward pass.
        note: how sums are made.
    """

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        own = [(name, list(module.parameters(recurse=False))) for name, module in model.named_modules()]
        own = [(name, parameters) for name, parameters in reversed(own) if parameters]
        self.layers = [(name, sum(one.numel() for one in parameters)) for name, parameters in own]
        self._bytes = [sum(one.nbytes for one in parameters) for _, parameters in own]
        self._model = DistributedDataParallel(model, bucket_cap_mb=_ONE_BYTE_MB, gradient_as_bucket_view=True)
        self._batch = batch
        self._made: list[TimedSum] = []
        reducer = HostReducer(watch=self._made.append)
        self.note = reducer.note
        self._reduction = BucketReduction(self._model, reducer)
        self._backward()  # whose buckets hold several layers

    def alone_ms(self) -> float:
        """Milliseconds of a backward pass without sums."""
        began = self._backward(sums=False)
        return (time.perf_counter() - began) * 1e3

    def beside_ms(self) -> dict[str, list[float]]:
        """Milliseconds of each layer by quantity, as `of_pass` has them, of a backward pass with sums beside it."""
        self._made.clear()
        began = self._backward()
        return of_pass(began, self._made, self._bytes)

    def close(self) -> None:
        """Give back what sums need."""
        self._reduction.close()

    def _backward(self, *, sums: bool = True) -> float:
        self._model.zero_grad(set_to_none=False)
        with nullcontext() if sums else self._model.no_sync():
            loss = loss_of(self._model(self._batch[0]), self._batch[1])
            dist.barrier()
            began = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
        return began


def of_pass(began: float, made: Iterable[TimedSum], sizes: Sequence[int]) -> dict[str, list[float]]:
    """Milliseconds of each layer, by quantity, from the sums of a backward pass.

    A layer's backward time is that from the layer behind it to its own last gradient. What is exposed of a sum ran when
    the last gradient was there, so that there was nothing left to hide behind.

    Args:
        began: the backward pass, as the sums' times of day.
        made: the sums; a layer's follow one another, whatever their number.
        sizes: bytes of each layer, in the order of the backward pass.

    Raises:
        ValueError: a bucket holds gradients of two layers, or sums went through gloo.
    """
    left = sorted(made, key=lambda one: one.given)
    finished = left[-1].given
    found: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for size in sizes:
        own: list[TimedSum] = []
        while left and sum(one.bytes for one in own) < size:
            own.append(left.pop(0))
        if sum(one.bytes for one in own) != size:
            raise ValueError("a bucket holds gradients of two layers: there are no layers to time")
        times = [one.times for one in own if one.times is not None]
        if len(times) < len(own):
            raise ValueError("these ranks cannot share memory, so sums go through gloo, which does not tell its times")
        found[BACKWARD].append((own[-1].given - began) * 1e3)
        began = own[-1].given
        found[BRING].append(sum(one.bring for one in times))
        found[ADD].append(sum(one.add for one in times))
        found[TAKE].append(sum(one.take for one in times))
        found[WAIT].append(sum(one.wait for one in times))
        found[EXPOSED].append(sum(max(0.0, one.ended - max(one.began, finished)) for one in own) * 1e3)
    return found
