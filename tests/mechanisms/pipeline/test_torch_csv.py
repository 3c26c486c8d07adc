"""Orders as CSV: torch's own schedules are read, torch's runtime loads what is written, and trains the same bits."""

import csv
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from retime.mechanisms.pipeline import PipelineStep
from retime.schedules.pipeline import (
    block,
    from_csv,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    modulo,
    one_forward_one_backward,
    placement_of,
    to_csv,
    v_shape,
    zb_h1,
    zbv,
)
from support.ranks import SHARED, on_ranks

MICRO_BATCHES, LAYERS, STEPS, WIDTH = 4, 4, 3, 144  # a weight is 81 KiB: more than what is computed in order
ORDERS = {
    "gpipe": gpipe(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "1f1b": one_forward_one_backward(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "zb_h1": zb_h1(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "interleaved": interleaved(modulo(4, 2), MICRO_BATCHES, first_output_gradient=True),
    "interleaved_zero_bubble": interleaved_zero_bubble(modulo(4, 2), MICRO_BATCHES, first_output_gradient=True),
    "zbv": zbv(v_shape(4, 2), MICRO_BATCHES, first_output_gradient=True),
}
TORCHS = {
    "1F1B": (1, (0, 1)),
    "GPipe": (1, (0, 1)),
    "Interleaved1F1B": (2, (0, 1, 0, 1)),
    "InterleavedZeroBubble": (2, (0, 1, 0, 1)),
    "LoopedBFS": (2, (0, 1, 0, 1)),
    "ZBVZeroBubble": (2, (0, 1, 1, 0)),
    "DualPipeV": (2, (0, 1, 1, 0)),
}


def ordered(name: str, chunks: int, **options: Any) -> list[list[Any]]:
    """What torch's schedule does on two ranks. Of 1F1B it numbers the last rank's forward passes from 1, and runs 0."""
    actions = get_schedule_ops(name, 2, 4, chunks, **options)
    if name == "1F1B":
        forward = [one for one in actions[-1] if one is not None and one.computation_type.value == "F"]
        first = min(one.microbatch_index for one in forward)
        actions[-1] = [
            one._replace(microbatch_index=one.microbatch_index - first) if one in forward else one
            for one in actions[-1]
        ]
    return actions


def written(actions: list[list[Any]]) -> str:
    """The text that torch's runtime would dump."""
    text = io.StringIO()
    csv.writer(text).writerows(actions)
    return text.getvalue()


def computed(actions: list[list[Any]]) -> list[list[str]]:
    """What ranks compute, without bubbles and messages; overlapped passes one after the other."""
    return [
        [str(part) for one in rank if one is not None and one.is_compute_op for part in one.sub_actions or (one,)]
        for rank in actions
    ]


def loaded(text: str, folder: Path, stages: int) -> list[list[Any]]:
    """What torch's runtime reads."""
    path = folder / "order.csv"
    path.write_text(text)
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 2, stages, None
    micro_batches = text.splitlines()[0].count("0F")
    runtime = _PipelineScheduleRuntime([stage] * (stages // 2), micro_batches)
    runtime._load_csv(str(path))
    return list(runtime.pipeline_order.values())


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_of_torchs_own_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    chunks, rank_of = TORCHS[name]
    actions = ordered(name, chunks)
    schedule = from_csv(written(actions))
    assert placement_of(schedule).rank_of == rank_of
    text = to_csv(schedule)
    assert [row.split(",") for row in text.splitlines()] == computed(actions)
    assert computed(loaded(text, tmp_path, 2 * chunks)) == computed(actions)
    if chunks > 1:
        with_messages = ordered(name, chunks, with_comms=True)
        assert from_csv(written(with_messages)) == schedule


@pytest.mark.parametrize("name", ORDERS)
def test_torchs_runtime_loads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = ORDERS[name]
    text = to_csv(schedule)
    actions = loaded(text, tmp_path, placement_of(schedule).stages)
    assert computed(actions) == [row.split(",") for row in text.splitlines()]
    assert from_csv(written(actions)) == schedule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, WIDTH, generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def ours(name: str, stages: int) -> list[Tensor]:
    """Weights after some steps of PipelineStep."""
    net = network()
    firsts = [str(layer) for layer in range(0, LAYERS, LAYERS // stages)]
    pipeline = PipelineStep(net, microbatches=MICRO_BATCHES, schedule=name, split=firsts)
    optimizer = optimizer_of([*net.parameters()])
    for inputs, targets in batches():
        pipeline.train(lambda part: mse_loss(net(part[0]), part[1]), (inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    pipeline.restore()
    return [parameter.detach() for parameter in net.parameters()]


def torchs(path: Path) -> dict[int, Tensor]:
    """Weights of this rank's stages after the same steps of torch's runtime, by number."""
    net, placement = network(), placement_of(from_csv(path.read_text()))
    layers = LAYERS // placement.stages
    mine = [stage - 1 for stage in placement.stages_of(dist.get_rank())]
    modules = {stage: net[stage * layers : (stage + 1) * layers] for stage in mine}
    stages = [PipelineStage(modules[one], one, placement.stages, torch.device("cpu")) for one in mine]
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=mse_loss)
    runtime._load_csv(str(path))
    optimizer = optimizer_of([parameter for module in modules.values() for parameter in module.parameters()])
    for inputs, targets in batches():
        first = (inputs,) if 0 in mine else ()
        last = {"target": targets} if placement.stages - 1 in mine else {}
        runtime.step(*first, return_outputs=False, **last)
        optimizer.step()
        optimizer.zero_grad()
    places = {id(parameter): number for number, parameter in enumerate(net.parameters())}
    return {places[id(p)]: p.detach() for module in modules.values() for p in module.parameters()}


@pytest.mark.long
@on_ranks(2)
def test_a_loaded_schedule_trains_as_ours() -> None:
    for name, schedule in ORDERS.items():
        path = SHARED / f"{name} {dist.get_rank()}.csv"
        path.write_text(to_csv(schedule))
        expected, found = ours(name, placement_of(schedule).stages), torchs(path)
        assert len(found) == LAYERS
        assert [place for place, one in found.items() if not torch.equal(one, expected[place])] == [], name
