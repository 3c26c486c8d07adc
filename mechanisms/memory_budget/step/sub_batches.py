"""One training step in sub-batches whose gradients add up to the batch's (moDNN, sections 4.2 and 5.1).

    certificate = certify(step, batch, model)            # once, with the first batch
    ...
    optimizer.zero_grad()
    output = SubBatches(model, step, batch, 4, certificate).run()    # forward and backward, 4 samples at a time
    optimizer.step()

Only one sub-batch's activations live at a time, so memory goes with ``sub_batch`` and not with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from retime.foundations.parts import (
    Certificate,
    NotSeparableError,
    Split,
    Weighting,
    WeightsUnclearError,
    WholeOutput,
    balanced_parts,
    ghost_momentum,
    loss_of,
    loss_weights,
    samples_in,
    split_batch,
)
from retime.mechanisms.memory_budget.separability import certify, compared

__all__ = ["SubBatches"]


class SubBatches:
    """A batch in parts; :meth:`run` does all of it, :meth:`forward` and :meth:`weighted` one part at a time.

    Args:
        model: what the step trains.
        step: computes on a batch and returns the loss, or a mapping or object with ``loss``.
        batch: the whole batch.
        sub_batch: the most samples that go through the model at once; parts are as few and as equal as that allows
            (:func:`~retime.foundations.parts.equal_parts.balanced_parts`).
        certificate: from :func:`~retime.mechanisms.memory_budget.separability.certify.certify`.
        split: a ``split_batch`` hook for batches that cannot be cut by their first dimension.
        certify_again: what to do with a batch whose weights the certificate leaves open; as default the step is probed
            with it.
        compare: whether the step does the same with batches of other sizes than are known; as default it is run
            without values.
        ghost: BatchNorm layers take their statistics from each sub-batch, by the user's choice: their momentum is made
            smaller meanwhile (:func:`~retime.foundations.parts.batchnorm.ghost_momentum`).

    Attributes:
        certificate: the one in force; keep it for the next batch.
        parts, samples, weights: of each sub-batch, in order. A batch of at most ``sub_batch`` samples is one part of
            weight 1, whatever the certificate says.
        guessed: places of scalars that are averaged by samples, since the certificate does not say how they add up:
            before the first part those that were probed, later also others that came up.

    Raises:
        NotSeparableError: the gradients would not add up.
        ValueError: the batch cannot be split.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Any], Any],
        batch: Any,
        sub_batch: int,
        certificate: Certificate,
        *,
        split: Split = split_batch,
        certify_again: Callable[[Any, Certificate], Certificate] | None = None,
        compare: Callable[[Any, Certificate, Collection[int]], Certificate] | None = None,
        ghost: bool = False,
    ) -> None:
        self._model, self._step, self._ghost = model, step, ghost
        self.certificate = certificate
        self.parts = balanced_parts(batch, sub_batch, split)
        self.samples = [samples_in(part, split) for part in self.parts]
        self.weights = [1.0]
        self.guessed: set[str] = set()
        if len(self.parts) > 1:
            try:
                self.weights = loss_weights(certificate, self.parts, self.samples)
            except WeightsUnclearError:
                again = certify_again or (
                    lambda whole, known: certify(step, whole, model, split=split, ghost=ghost, among=known)
                )
                self.certificate = again(batch, certificate)
                self.weights = loss_weights(self.certificate, self.parts, self.samples)
            sizes = {*self.samples, sum(self.samples)}
            if self.certificate.samples and not sizes <= self.certificate.sizes:
                compare = compare or (lambda whole, known, new: compared(step, whole, model, known, new, split=split))
                self.certificate = compare(batch, self.certificate, sizes - self.certificate.sizes)
                if not self.certificate.separable:
                    raise NotSeparableError(self.certificate.reason)
            self.guessed.update(self.certificate.unclear)
        self._outputs = WholeOutput(self.samples)

    def __len__(self) -> int:
        return len(self.parts)

    def forward(self, index: int) -> Any:
        """Run the step on one part and return what it returns; keeps what :meth:`result` needs of it, detached.

        Parts are run in order, each once.

        Raises:
            RuntimeError: it is not this part's turn.
        """
        if index != len(self._outputs):
            raise RuntimeError(f"sub-batch {index} is not next: run {len(self._outputs)} of {len(self)} first")
        output = self.compute(index)
        self._outputs.add(output)
        return output

    def compute(self, index: int) -> Any:
        """What the step returns for one part; nothing is kept of it."""
        with ghost_momentum(self._model, len(self)) if self._ghost else nullcontext():
            return self._step(self.parts[index])

    def weighted(self, index: int, loss: Tensor) -> Tensor | None:
        """The loss to run the backward pass of one part from; None where the part has nothing to learn from."""
        weight = self.weights[index]
        if weight == 1:
            return loss
        return loss * weight if weight else None

    def run(self, backward: Callable[[Tensor], Any] | None = None, start: int = 0) -> Any:
        """Forward and backward of all parts from ``start`` on; returns :meth:`result`.

        Args:
            backward: what to do with each part's weighted loss; ``loss.backward()`` as default.
            start: the first part that has not been run, for callers that ran others by themselves.
        """
        for index in range(start, len(self)):
            loss = self.weighted(index, loss_of(self.forward(index)))
            if loss is None:
                continue
            if backward is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                backward(loss)
            del loss  # else this part's graph would live on through the next part's forward pass
        return self.result()

    def result(self) -> Any:
        """What the step would have returned for the whole batch, detached.

        The loss is exact; so are the scalars that the certificate knows how to add up. Other scalars are averaged by
        samples.

        Raises:
            RuntimeError: not all parts have been run.
        """
        if len(self._outputs) < len(self):
            raise RuntimeError(f"only {len(self._outputs)} of {len(self)} sub-batches have been run")
        return self._outputs.result(self.weights_of)

    def weights_of(self, place: str) -> list[float]:
        """The parts' weights for a scalar that the step returns at ``place``; the loss's own for the loss."""
        if len(self) == 1 or place in ("output", "output['loss']", "output.loss"):
            return self.weights
        if place not in self.certificate.outputs:
            self.guessed.add(place)
        weighting = self.certificate.outputs.get(place, Weighting("mean"))
        return self.weights if weighting == self.certificate.weighting else weighting.of(self.parts, self.samples)
