"""`cpuacc_table4` in small, and the sums of layers that it times."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from rich.console import Console
from torch import nn

from retime.mechanisms.ddp.reducers import HostReducer
from retime.recipes.core.schema import register_all, settings_of
from retime.recipes.cpuacc.layer_sums import LayerSums
from retime.recipes.cpuacc.layer_table import ALL, BACKWARD, COPY, EXPOSED, OF_BACKWARD, SLOWER, SUM, WAITED, LayerTable

SMALL = [
    "experiment=cpuacc_table4",
    "rank_counts=[2]",
    "rounds=2",
    "warmup_rounds=0",
    "cases.AlexNet.batch_size=2",
    "cases.AlexNet.model.width=0.03125",
]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_every_layer(tmp_path: Path) -> None:
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        settings = settings_of(compose("config", SMALL))
    recipe = LayerTable()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    layers = [f"layer {number}" for number in range(8, 0, -1)]
    assert point.variants(SUM) == point.variants(COPY) == layers
    assert point.variants(BACKWARD) == [*layers, ALL]
    assert len(point.values(ALL, EXPOSED)) == 2
    assert "parameters" in point.facts["layers"]["layer 8"]
    assert [line.against for line in recipe.compare(result)] == [OF_BACKWARD, WAITED, SLOWER]
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sums_beside_a_backward_pass_are_of_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    network = LayerSums(model, batch)
    assert [(layer.name, layer.gradients.numel()) for layer in network.layers] == [("0", 35), ("2", 18)]
    reducer = HostReducer()
    for _ in range(2):
        assert all(milliseconds > 0 for milliseconds in network.overlapped_ms(reducer))
        assert all(map(torch.equal, expected, (parameter.grad for parameter in model.parameters())))
    reducer.close()
    assert all(milliseconds > 0 for milliseconds in network.backward_ms())
