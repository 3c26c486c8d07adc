"""Certificates hold for other batches, other weights and other settings than those that were probed, or there are none.

``RETIME_RANDOM=5000`` tries that many seeds; one in every run of the tests, the others in long ones.
"""

import os

import pytest
import torch

from retime.foundations.parts.combine import Certificate, NotSeparableError, WeightsUnclearError
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_losses import ORDINARY, TRICKY, Learner, Loss, batch_of

COUNT = max(2, int(os.environ.get("RETIME_RANDOM", "0")) // (len(ORDINARY) + len(TRICKY)))
BATCHES = 4


def gradient(model: Learner) -> torch.Tensor:
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def certificate_of(loss: Loss, seed: int) -> Certificate:
    """What the first batch gives, after it was used for others; weights that were wrong for one fail the test."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Learner()
    sizes = torch.randint(4, 17, (BATCHES + 1,), generator=generator).tolist()
    certificate = first = certify(lambda part: loss(model, part), batch_of(sizes[0], generator), model)
    for samples in sizes[1:]:
        if not certificate.separable:
            break
        model.change(generator)
        batch = batch_of(samples, generator)
        torch.manual_seed(0)
        loss(model, batch).backward()
        whole = gradient(model)
        torch.manual_seed(0)
        size = int(torch.randint(1, samples, (), generator=generator))
        try:
            parts = SubBatches(model, lambda part: loss(model, part), batch, size, certificate)
        except (NotSeparableError, WeightsUnclearError):
            break
        certificate = parts.certificate
        parts.run()
        scale = whole.norm() + sum(p.numel() for p in model.parameters()) * 1e-6
        assert float((gradient(model) - whole).norm() / scale) < 1e-3, (
            f"seed {seed}, {samples} by {size}: {certificate}"
        )
    return first


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, COUNT), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*ORDINARY, *TRICKY])
def test_ordinary_losses_are_split_and_those_that_only_look_separable_not_wrongly(name: str, seeds: range) -> None:
    for seed in seeds:
        assert certificate_of((ORDINARY | TRICKY)[name], seed).separable or name in TRICKY
