"""The pipeline runtime of torch and the orders of its schedules."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from retime.foundations.torch_private import distributed
from support.private_canaries import canary


class Stage:
    """The only one of a pipeline, which notes what it is asked for."""

    stage_index, num_stages, group_rank, group_size = 0, 1, 0, 1
    is_first = is_last = has_backward = True
    submod = nn.Module()
    output_chunks: list[Any] = []  # noqa: RUF012
    stage_index_to_group_rank = {0: 0}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def forward_one_chunk(self, batch: int, *args: Any, **kwargs: Any) -> list[Any]:
        self.asked.append(("F", batch))
        return []

    def backward_one_chunk(self, batch: int, loss: Any, full_backward: bool, last_backward: bool) -> None:
        self.asked.append(("B" if full_backward else "O", batch, last_backward))

    def backward_weight_one_chunk(self, batch: int, last_backward: bool) -> None:
        self.asked.append(("W", batch, last_backward))

    def perform_reduce_grad(self, factor: int) -> None:
        self.asked.append(("reduce", factor))


@pytest.mark.usefixtures("one_rank")
@canary("pipeline_runtime", breaks="ooo_pipeline")
def test_the_runtime_does_what_it_is_told():
    stage = Stage()
    orders = {0: [("F", 0, 0), ("F", 0, 1), ("O", 0, 1), ("B", 0, 0), ("W", 0, 1)]}
    distributed.pipeline_runtime([stage], 2, orders).run()
    assert stage.asked == [("F", 0), ("F", 1), ("O", 1, False), ("B", 0, False), ("W", 1, True), ("reduce", 1)]


@pytest.mark.usefixtures("one_rank")
@canary("timeout_of", breaks="how long ooo_pipeline waits for weights that some ranks share")
def test_a_group_tells_how_long_it_waits():
    group = dist.new_group([0], timeout=timedelta(seconds=7))
    assert distributed.timeout_of(group, torch.device("cpu")) == timedelta(seconds=7)


@canary("torch_pipeline_orders", "PipelineAction", breaks="torch's own schedules in ooo_pipeline")
def test_orders_of_torchs_schedules():
    orders, rank_of = distributed.torch_pipeline_orders("InterleavedZeroBubble", 2, 4, 2)
    assert rank_of == (0, 1, 0, 1)
    for rank, order in orders.items():
        assert sorted(order) == sorted(
            (kind, stage, batch) for kind in "FOW" for stage in (rank, rank + 2) for batch in range(4)
        )
    with pytest.raises(ValueError, match="Unknown schedule"):
        distributed.torch_pipeline_orders("Nonesuch", 2, 4, 2)


class OneOfTwo(Stage):
    """The first stage of two, on the first rank."""

    num_stages, group_size = 2, 2
    is_last = False
    stage_index_to_group_rank = {0: 0, 1: 1}  # noqa: RUF012


@pytest.mark.usefixtures("one_rank")
def test_messages_are_asked_for_ahead():
    orders = {
        0: [("F", 0, batch) for batch in range(4)] + [("B", 0, batch) for batch in range(4)],
        1: [(kind, 1, batch) for batch in range(4) for kind in "FB"],
    }

    def received(ask_ahead: int) -> tuple[list[str], list[str]]:
        messages = distributed.pipeline_runtime([OneOfTwo()], 4, orders, ask_ahead=ask_ahead).with_messages[1]
        names = [str(action) for action in messages]
        return names, [name for name in names if "RECV" in name]

    plain, receives = received(0)
    ahead, receives_ahead = received(1)
    assert receives_ahead == receives
    assert [name for name in ahead if name not in receives] == [name for name in plain if name not in receives]
    earlier = [plain.index(name) - ahead.index(name) for name in receives]
    assert min(earlier) >= 0
    assert max(earlier) > 0
