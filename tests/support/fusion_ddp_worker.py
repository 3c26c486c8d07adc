"""One rank of tests/mechanisms/fusion/test_data_parallel.py: bare DDP loops, plain against fused, two gloo ranks."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime import fuse_optimizer
from support.fusion import network


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


def loop(mode: str | None, rank: int, micro_batches: int, **ddp: Any) -> tuple[list[Tensor | None], Any]:
    model = DistributedDataParallel(Sometimes(), bucket_cap_mb=0.02, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    fusion = fuse_optimizer(model, optimizer, mode) if mode else None
    generator = torch.Generator().manual_seed(rank)
    seen: list[Tensor | None] = []
    for i in range(6):
        for j in range(micro_batches):
            last = j == micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                both = not ddp.get("find_unused_parameters") or (i % 3 == 2 and rank == 0)
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


def cases() -> Iterator[tuple[int, dict[str, Any]]]:
    for view in (True, False):
        for options in ({}, {"find_unused_parameters": True}):
            for micro_batches in (1, 3):
                yield micro_batches, {"gradient_as_bucket_view": view, **options}
        yield 1, {"gradient_as_bucket_view": view, "static_graph": True}


def refusals() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"sparse gradients of '0'"):
        fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="side_stream is for one device"):
        fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), side_stream=True)
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="has one already"):
        fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for micro_batches, options in cases():
        plain, _ = loop(None, rank, micro_batches, **options)
        for mode in ("backward", "forward"):
            ours, report = loop(mode, rank, micro_batches, **options)
            assert report.fused_updates > 60, (mode, options, report)
            for a, b in zip(plain, ours, strict=True):
                assert (a is None) == (b is None), (mode, micro_batches, options)
                assert a is None or torch.equal(a, b), (mode, micro_batches, options)  # type: ignore[arg-type]
    refusals()
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    print(f"rank {rank}: same bits", flush=True)
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


if __name__ == "__main__":
    sys.exit(main())
