"""Fusion under bare DistributedDataParallel: accumulation, unused layers, bucket views, static graphs, guards."""

import threading
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from retime.mechanisms.fusion.data_parallel import DataParallelFusion, ReductionHook
from support.ranks import run_two_ranks
from support.time_limits import limit_s


def test_two_ranks_keep_the_bits_of_plain_ddp() -> None:
    for number, rank in enumerate(run_two_ranks("fusion_ddp_worker.py")):
        assert f"rank {number}: same bits" in rank.stdout, rank.stderr


def test_a_step_is_abandoned_behind_the_update_that_another_thread_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(2))
    fusion = DataParallelFusion(torch.optim.SGD([parameter], 0.1), Mock(ReductionHook))
    (followed,) = fusion._followed.values()
    followed.fired = 1
    abandons = threading.Thread(target=fusion.abandon_step)

    def step(window: object, parameters: list[torch.Tensor]) -> None:
        abandons.start()
        abandons.join(0.2)  # in which it would be done, if it did not wait

    monkeypatch.setattr(fusion, "_step", step)
    fusion.update_reduced([parameter], [torch.ones(2)])
    abandons.join(limit_s(30))
    assert (followed.fired, followed.used) == (0, False)
    fusion.remove()
