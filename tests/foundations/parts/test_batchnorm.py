"""BatchNorm under sub-batches: layers by name, and ghost statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retime.foundations.parts.combine import batch_statistics_layers, ghost_momentum
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_steps import classifier, convolutional


def test_layers_that_need_the_whole_batch_are_named() -> None:
    head = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12))
    model = nn.ModuleDict({"norm": nn.BatchNorm2d(8), "norm2": nn.BatchNorm2d(8), "head": head})

    assert batch_statistics_layers(model) == ["norm", "norm2", "head.1"]
    model["norm2"].eval()
    assert batch_statistics_layers(model) == ["norm", "head.1"]
    assert batch_statistics_layers(model.eval()) == []
    assert batch_statistics_layers(nn.SyncBatchNorm(4)) == [""]
    assert batch_statistics_layers(nn.Sequential(nn.GroupNorm(1, 4), nn.InstanceNorm2d(4))) == []


def test_ghost_statistics_move_as_far_as_a_batchs() -> None:
    torch.manual_seed(0)
    plain, ghost = nn.BatchNorm1d(4, momentum=0.1), nn.BatchNorm1d(4, momentum=0.1)
    value = torch.randn(1, 4)
    plain(value.expand(12, 4))
    with ghost_momentum(ghost, 3):
        for _ in range(3):
            ghost(value.expand(4, 4))

    torch.testing.assert_close(ghost.running_mean, plain.running_mean)
    assert ghost.momentum == 0.1
    naive = nn.BatchNorm1d(4, momentum=0.1)
    for _ in range(3):
        naive(value.expand(4, 4))
    assert (naive.running_mean - plain.running_mean).abs().max() > 0.1 * plain.running_mean.abs().max()


@pytest.mark.parametrize("momentum", [None, 1.0, 0.0])
def test_ghost_momentum_at_its_ends(momentum: float | None) -> None:
    layer = nn.BatchNorm1d(4, momentum=momentum)

    with ghost_momentum(layer, 5):
        assert layer.momentum == momentum


def test_ghost_sub_batches_train_with_their_own_statistics() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional(nn.BatchNorm2d))
    layer = case.model[1]
    certificate = certify(case.step, case.batch, case.model, ghost=True)
    assert certificate.separable

    parts = SubBatches(case.model, case.step, case.batch, 4, certificate, ghost=True)
    result = parts.run()

    by_hand = copy.deepcopy(case.model)
    losses = [F.cross_entropy(by_hand(part[0]), part[1]) * size / 11 for part, size in zip(parts.parts, (4, 4, 3))]  # noqa: B905
    torch.testing.assert_close(result, torch.stack(losses).sum().detach())
    assert layer.momentum == 0.1
    assert layer.num_batches_tracked == 3
    assert all(p.grad is not None for p in case.model.parameters())
