"""Fusion under bare DistributedDataParallel: accumulation, unused layers, bucket views, static graphs, guards."""

import contextlib
import threading
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime import fuse_optimizer
from retime.mechanisms.fusion.data_parallel import DataParallelFusion, ReductionHook
from support.fusion import network
from support.ranks import RANK, on_ranks
from support.time_limits import limit_s


class Sometimes(nn.Module):
    """A network, and a layer that not every step, and not every rank, uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = network(depth=6, width=64)
        torch.manual_seed(1)
        self.sometimes = nn.Linear(64, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        total = self.always(x).square().mean()
        return total + self.sometimes(x).mean() if both else total  # type: ignore[no-any-return]


def loop(mode: str | None, micro_batches: int, **ddp: Any) -> tuple[list[Tensor | None], Any]:
    model = DistributedDataParallel(Sometimes(), bucket_cap_mb=0.02, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    fusion = fuse_optimizer(model, optimizer, mode) if mode else None
    generator = torch.Generator().manual_seed(RANK)
    seen: list[Tensor | None] = []
    for i in range(6):
        for j in range(micro_batches):
            last = j == micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                both = not ddp.get("find_unused_parameters") or (i % 3 == 2 and RANK == 0)
                model(torch.randn(4, 64, generator=generator), both).backward()
        if mode == "backward":
            with pytest.raises(RuntimeError, match="consumed by backward fusion"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
    report = fusion.report() if fusion else None
    if fusion:
        fusion.remove()
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [*seen, *(p.detach().clone() for p in model.parameters()), *state], report


@on_ranks(2)
def test_two_ranks_keep_the_bits_of_plain_ddp() -> None:
    unused: tuple[dict[str, Any], ...] = ({}, {"find_unused_parameters": True})
    cases = [*product(unused, (1, 3)), ({"static_graph": True}, 1)]
    for view, (options, micro_batches) in product((True, False), cases):
        options = {"gradient_as_bucket_view": view, **options}
        plain, _ = loop(None, micro_batches, **options)
        for mode in ("backward", "forward"):
            ours, report = loop(mode, micro_batches, **options)
            assert report.fused_updates > 60, (mode, options, report)
            for a, b in zip(plain, ours, strict=True):
                assert (a is None) == (b is None), (mode, micro_batches, options)
                assert a is None or torch.equal(a, b), (mode, micro_batches, options)  # type: ignore[arg-type]


@on_ranks(2)
def test_refusals() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"sparse gradients of '0'"):
        fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = DistributedDataParallel(nn.Linear(4, 4))
    for more in ({"side_stream": True}, {"backward_passes": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(more))} is for one device"):
            fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="has one already"):
        fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


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
