"""Fusion under bare DistributedDataParallel: accumulation, unused layers, bucket views, static graphs, guards."""

import threading

import pytest
import torch
from torch import nn

from retime.mechanisms.fusion.data_parallel import DataParallelFusion, ReductionHook
from support.time_limits import limit_s
from support.two_ranks import run_two_ranks


def test_two_ranks_keep_the_bits_of_plain_ddp() -> None:
    for number, rank in enumerate(run_two_ranks("fusion_ddp_worker.py")):
        assert f"rank {number}: same bits" in rank.stdout, rank.stderr


class WithoutModel(ReductionHook):
    """Reduces nothing."""

    def __init__(self) -> None:
        pass

    def join(self, fusion: DataParallelFusion) -> None:
        pass

    def leave(self, fusion: DataParallelFusion) -> None:
        pass


def test_a_step_is_abandoned_behind_the_update_that_another_thread_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(2))
    fusion = DataParallelFusion(torch.optim.SGD([parameter], 0.1), WithoutModel())
    at_it, may_go_on = threading.Event(), threading.Event()

    def step(window: object, parameters: list[torch.Tensor]) -> None:
        at_it.set()
        may_go_on.wait(limit_s(30))

    monkeypatch.setattr(fusion, "_step", step)
    parameter.grad = torch.ones(2)
    (followed,) = fusion._followed.values()
    followed.fired = 1
    threads = [
        threading.Thread(target=fusion.update_reduced, args=([parameter], [torch.ones(2)])),
        threading.Thread(target=fusion.abandon_step),
    ]
    threads[0].start()
    assert at_it.wait(limit_s(30))
    threads[1].start()
    threads[1].join(0.2)  # in which it would be done, if it did not wait
    may_go_on.set()
    for thread in threads:
        thread.join(limit_s(30))
    assert (followed.fired, followed.used) == (0, False)
    fusion.remove()
