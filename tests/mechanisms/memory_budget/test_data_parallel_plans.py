"""On two gloo ranks: plans that are given, and plans without dry runs."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from retime.commands.main import main as retime
from retime.mechanisms.memory_budget.plan_files import PlanFileError
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetDDPStrategy
from support.memory_budget import OFFLOADS, SPLITS, Net, assert_close, assert_way, loader
from support.memory_budget_ranks import SMALL, batches, fit, on_two_ranks, plan_with, report
from support.ranks import RANK, SHARED


def saved(name: str) -> Net:
    module, strategy = Net(), MemoryBudgetDDPStrategy(SMALL)
    fit(module, strategy)
    strategy.save_plan(SHARED / name)  # rank 0 writes
    dist.barrier()
    return module


def taken(name: str, way: str, **options: Any) -> Net:
    """Trained by the plan of a file, though a plan of one's own would be another."""
    plan_with(SPLITS if way == "offload" else OFFLOADS)
    module = Net()
    done = fit(module, MemoryBudgetDDPStrategy(SMALL, plan=SHARED / name, **options))
    assert_way(report(done), way)
    assert f"plan of {SHARED / name}" in str(report(done).shapes[0])
    return module


@on_two_ranks
def test_plans_of_a_run_are_taken_by_all_ranks() -> None:
    plan_with(OFFLOADS)
    first = saved("whole.json")
    assert_close(first, taken("whole.json", "offload"), 0)
    assert_close(first, taken("whole.json", "offload", dry_run="off"), 0)
    plan_with(SPLITS)
    assert_close(saved("parts.json"), taken("parts.json", "sub-batches"), 0)


def made() -> Any:
    return Net(), next(iter(loader(1)))


@on_two_ranks
def test_plans_of_the_command_are_taken_by_all_ranks() -> None:
    plan_with(SPLITS)
    if RANK == 0:
        asked = "plan", "test_data_parallel_plans:made", "--budget", str(SMALL), "--ddp"
        assert retime([*asked, "--save", str(SHARED / "command.json")]) == 0
        assert retime([*asked, "--ranks", "3", "--save", str(SHARED / "three.json")]) == 0
    dist.barrier()
    taken("command.json", "sub-batches")
    with pytest.raises(PlanFileError, match=r"three.json.*made for reduction_bytes"):
        fit(Net(), MemoryBudgetDDPStrategy(SMALL, plan=SHARED / "three.json"))


class Counting(Net):
    """A step with a side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


@on_two_ranks
def test_without_dry_runs_steps_run_as_under_ddp() -> None:
    for data in (None, batches([[256, 16, 256, 256], [16, 256, 256, 16]][RANK])):
        plain, ours = Counting(), Counting()
        fit(plain, "ddp", data)
        done = fit(ours, MemoryBudgetDDPStrategy(SMALL, dry_run="off"), data)
        assert ours.calls == plain.calls
        assert_close(plain, ours, 0)
        assert report(done).offload.storages > 0
        assert report(done).steps == len(plain.calls)


def refused(strategy: MemoryBudgetDDPStrategy, match: str) -> None:
    module = Net()
    with pytest.raises(PlanFileError if RANK else RuntimeError, match=match if RANK else "rank 1 "):
        fit(module, strategy)
    assert_close(Net(), module, 0)


@on_two_ranks
def test_a_file_that_one_rank_refuses_is_refused_by_all() -> None:
    plan_with(OFFLOADS)
    saved("good.json")
    file = SHARED / f"rank-{RANK}.json"
    for dry_run, change, match in (
        ("auto", lambda state: state["plans"].clear(), "it has no plan for this shape"),
        (
            "off",
            lambda state: state["plans"][0].update(samples=1, plan="sub-batch 1, prefetch 0, offload none of 9"),
            "is for batches of 1",
        ),
        ("auto", lambda state: state["made_for"].update(reduction_bytes=0), "made for reduction_bytes 0, not "),
    ):
        state = json.loads((SHARED / "good.json").read_text())
        if RANK == 1:
            change(state)
        file.write_text(json.dumps(state))
        strategy = MemoryBudgetDDPStrategy(SMALL, plan=file, dry_run=dry_run)
        refused(strategy, match)


@on_two_ranks
def test_a_budget_that_one_rank_cannot_keep_ends_all_without_dry_runs() -> None:
    with pytest.raises(BudgetError, match="was exceeded in the first step" if RANK else "rank 1 refuses its budget"):
        fit(Net(), MemoryBudgetDDPStrategy([SMALL, 20_000][RANK], dry_run="off"))
