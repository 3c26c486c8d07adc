"""Real processes under a limit of data bytes: a plain step dies where an offloading one lives, with equal gradients."""

import json
import sys
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.memory_budget.costs import calibrate
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, profile_step
from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory
from support.paths import SUPPORT, TESTS
from support.warm_start import run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits and /proc")
WORKER = SUPPORT / "memory_limit_worker.py"
PLANNING = SUPPORT / "memory_planning_worker.py"
MIB = 2**20
BESIDE = 24 * MIB
"""For Python's objects of a plan, and for heaps, which grow in steps, used or not."""
DISK = TESTS.parent  # a folder for temporary files may be in memory


@cache
def worker(*arguments: str) -> dict[str, Any]:
    """Steps in a process of their own."""
    return json.loads(run_program(WORKER.read_text(), str(DISK), *arguments).splitlines()[-1])


def without_limit() -> dict[str, Any]:
    return worker("conv,mlp")


def test_a_plain_step_dies_where_offloading_lives() -> None:
    free = without_limit()["conv"]
    assert free["offload"]["gradients"] == free["plain"]["gradients"]
    assert free["offload"]["held"] == 0
    limited = worker("conv", str((free["plain"]["predicted"] + free["offload"]["predicted"]) // 2))["conv"]
    assert "can't allocate memory" in limited["plain"]["error"]
    assert limited["offload"]["gradients"] == free["plain"]["gradients"]


@pytest.mark.parametrize("mode", ["plain", "offload"])
@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_the_process_grows_as_predicted(name: str, mode: str) -> None:
    grown = without_limit()[name][mode]
    if grown["source"] != "VmHWM":
        pytest.skip("the kernel does not keep this process's peak")
    # What libraries need for themselves differs by a MiB or two from run to run.
    assert grown["measured"] == pytest.approx(grown["predicted"], rel=0.08, abs=3 * MIB)


class Clamped(nn.Linear):
    """Writes into its weights in each forward pass, as networks with bounded weights do."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(input)


@pytest.mark.parametrize("layer", [nn.Linear, Clamped])
@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_calibration_measures_and_leaves_the_step_alone(tier: str, layer: type[nn.Linear]) -> None:
    model = nn.Sequential(layer(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = TrainingStep(model, torch.randn(256, 8), 256, lambda part: model(part).square().sum())
    plain = profile_step(step)
    assert plain.trace.writes_parameters is (layer is Clamped)
    with HostDisk(DISK) if tier == "disk" else nullcontext(HostMemory("cpu")) as host:
        costs = calibrate(step, host, plain=plain)
        assert host.live_bytes() == 0
    assert costs.fixed_ms + costs.sample_ms > 0
    assert min(costs.out_bytes_per_ms, costs.in_bytes_per_ms) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "budget"), [("conv", 80 * MIB), ("gpt", 45 * MIB)])
def test_planning_keeps_the_budget_too(kind: str, budget: int) -> None:
    if kind == "gpt":
        pytest.importorskip("transformers")
    said = run_program(PLANNING.read_text(), kind, str(budget), str(BESIDE))
    first, second = (json.loads(line) for line in said.splitlines()[-2:])
    for fit in (first, second):
        assert fit["tried"] > 1
        assert "no room" not in fit["note"]
    if not first["grown"]:
        pytest.skip("the kernel does not keep this process's peak")
    assert second["grown"] <= 1.02 * budget
    for fit in (first, second):
        report = " ".join(fit["report"].split())
        assert "the process grew by" in report
        assert ("above the budget" in report) == (fit["grown"] > budget)
