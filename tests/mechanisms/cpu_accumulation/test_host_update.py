"""Updates that the ranks of a machine divide, among processes; whole fits are in the contract table."""

import copy
import os
import pickle
import re
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import retime
from retime.foundations.messages import NoEffectWarning
from retime.foundations.native import NoLibraryError
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer, HostUpdate
from retime.mechanisms.cpu_accumulation import shared_sums as sums
from retime.mechanisms.cpu_accumulation.host_update import state_bytes
from retime.mechanisms.cpu_accumulation.shared_sums import sums_library
from retime.strategies import CPUAccumulateStrategy
from support.ranks import RANK, RANKS, on_ranks, run_ranks, said_in
from support.time_limits import limit_s
from support.trainers import quiet_trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
MINUTES = timedelta(minutes=10)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    library = sums_library()
    if isinstance(library, NoLibraryError):
        pytest.skip(str(library))


class Odd(nn.Module):
    """Parameters of many kinds: large, transposed, channels last, without dimension or element, in three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(200, 200)
        self.transposed = nn.Parameter(torch.randn(200, 160).t())
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.short = nn.Linear(200, 100).bfloat16()
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.frozen = nn.Linear(10, 10).requires_grad_(False)

    def forward(self, inputs: Tensor, *, skip: bool = False) -> Tensor:
        hidden = self.large(inputs).relu()
        image = self.conv(hidden[:, :196].reshape(-1, 4, 7, 7)).mean()
        half = self.short(hidden.bfloat16()).float().mean()
        total = (hidden @ self.transposed.t()).square().mean() + image * self.scale + half + self.nothing.sum()
        return total if skip else total + self.wide.square().mean()  # type: ignore[no-any-return]


def inputs(step: int) -> Tensor:
    return torch.randn(4, 200, generator=torch.Generator().manual_seed(100 * step + RANK))


Make = Callable[[Iterable[Tensor]], Optimizer]


class Run:
    """A loop with an optimizer of its own, whose updates are divided or not."""

    def __init__(self, make: Make, *, divided: bool, **options: Any) -> None:
        self.model = DistributedDataParallel(Odd(), bucket_cap_mb=0.05, **options)
        self.net: Odd = self.model.module
        self.reduction = BucketReduction(self.model, HostReducer(timeout=MINUTES))
        self.optimizer = make([one for one in self.net.parameters() if one.requires_grad])
        self.update = HostUpdate(self.optimizer, self.reduction.parameters, timeout=MINUTES) if divided else None
        self.done = 0

    def train(self, steps: int, **options: Any) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(inputs(self.done), **options).backward()
            self.optimizer.step()
            self.done += 1

    def close(self, *, failed: bool = False) -> None:
        if self.update is not None:
            self.update.remove(failed=failed)
        self.reduction.close()


def pair(make: Make, steps: int) -> tuple[Run, Run]:
    """One whose updates are divided and one whose are not, after as many steps."""
    runs = Run(make, divided=True), Run(make, divided=False)
    for run in runs:
        run.train(steps)
    return runs


def plain(value: Any) -> Any:
    """Without what differs in files of equal tensors: layout, sharing."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else [])
    if isinstance(value, dict):
        return [(key, plain(one)) for key, one in sorted(value.items(), key=lambda item: str(item[0]))]
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def assert_same(ours: Run, theirs: Run) -> None:
    assert plain(ours.net.state_dict()) == plain(theirs.net.state_dict()), "other weights"


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert plain(ours) == plain(theirs), "another state"


def end(ours: Run, theirs: Run) -> None:
    """They have the same weights, and the same state as soon as it is whole."""
    assert_same(ours, theirs)
    ours.close()
    assert_same_state(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    theirs.close()


def held(optimizer: Optimizer) -> int:
    return sum(state_bytes(state) for state in optimizer.state.values())


def over_ranks(number: int) -> list[int]:
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, number)
    return every


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adamw": adamw,
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # has state before the first step
    "adafactor": lambda p: torch.optim.Adafactor([one for one in p if one.numel()], lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


@on_ranks(2)
def test_optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        ours, theirs = pair(make, 4)
        assert_same(ours, theirs)
        whole = held(theirs.optimizer)
        parts = over_ranks(held(ours.optimizer))
        assert sum(parts) == whole, name
        assert max(parts) < whole, name
        report = ours.update.report()
        assert (report.steps, report.state_bytes, report.whole_state_bytes) == (4, held(ours.optimizer), whole)
        assert sum(over_ranks(report.updated_bytes)) == report.parameter_bytes
        ours.close()
        assert_same_state(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
        for one, other in zip(ours.optimizer.state.values(), theirs.optimizer.state.values(), strict=True):
            assert [v.stride() for v in one.values() if isinstance(v, Tensor)] == [
                v.stride() for v in other.values() if isinstance(v, Tensor)
            ]
        ours.train(2)  # on its own again
        theirs.train(2)
        assert_same(ours, theirs)
        assert ours.optimizer.__dict__.keys() == theirs.optimizer.__dict__.keys()
        theirs.close()


@on_ranks(4)
def test_two_machines() -> None:
    with patch.object(sums, "machine", lambda: f"host {RANK % 2}"):
        ours, theirs = pair(adamw, 3)
    assert_same(ours, theirs)
    parts = over_ranks(held(ours.optimizer))
    assert parts[0] + parts[2] == parts[1] + parts[3] == held(theirs.optimizer)
    state = ours.update.state_dict()
    if RANK == 0:
        assert_same_state(state, theirs.optimizer.state_dict())
    end(ours, theirs)


@on_ranks(2)
def test_states_are_whole_and_come_back() -> None:
    ours, theirs = pair(adamw, 2)
    state = ours.update.state_dict()
    if RANK == 0:
        assert_same_state(state, theirs.optimizer.state_dict())
    for read in (
        ours.optimizer.state_dict,
        lambda: copy.deepcopy(ours.optimizer),
        lambda: pickle.dumps(ours.optimizer),
    ):
        with pytest.raises(RuntimeError, match="a part of the optimizer's state only, as the ranks"):
            read()
    ours.train(1)
    early = copy.deepcopy(theirs.optimizer.state_dict())
    theirs.train(1)
    for run in (ours, theirs):
        run.optimizer.load_state_dict(copy.deepcopy(early))
        run.train(2)
    assert sum(over_ranks(held(ours.optimizer))) == held(theirs.optimizer)
    end(ours, theirs)
    copy.deepcopy(ours.optimizer)


@on_ranks(2)
def test_state_from_before() -> None:
    """A state that every rank has, as after a checkpoint was loaded, is divided in the first step."""
    ours, theirs = Run(adamw, divided=False), Run(adamw, divided=False)
    for run in (ours, theirs):
        run.train(2)
    ours.update = HostUpdate(ours.optimizer, ours.reduction.parameters)
    for run in (ours, theirs):
        run.train(2)
    assert sum(over_ranks(held(ours.optimizer))) == held(theirs.optimizer)
    end(ours, theirs)


@on_ranks(2)
def test_parameters_change() -> None:
    """Some without a gradient, some frozen for a while, a group that is added, one that DDP does not reduce."""
    find = {"find_unused_parameters": True}

    def make(parameters: Iterable[Tensor]) -> Optimizer:
        return torch.optim.AdamW([one for one in parameters if one.numel() not in (40000, 200)], lr=1e-2)

    ours, theirs = (Run(make, divided=divided, **find) for divided in (True, False))
    own = [nn.Parameter(torch.ones(30)) for _ in range(2)]
    for run, mine in ((ours, own[0]), (theirs, own[1])):
        run.train(2, skip=True)
        run.net.conv.requires_grad_(False)
        run.train(2)
        run.net.conv.requires_grad_(True)
        run.optimizer.add_param_group({"params": list(run.net.large.parameters()), "lr": 1e-3})
        run.train(2, skip=True)
        run.optimizer.add_param_group({"params": [mine]})
        mine.grad = torch.full((30,), float(RANK))
        run.train(1)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5
        mine.grad = torch.full((30,), RANK + 1.0)
        run.model(inputs(run.done)).backward()
        run.optimizer.step()
    assert plain(own[0]) == plain(own[1])
    end(ours, theirs)


@on_ranks(2)
def test_closures() -> None:
    ours, theirs = pair(adamw, 0)

    def run_closure(run: Run) -> float:
        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss: Tensor = run.model(inputs(run.done))
            loss.backward()
            return loss

        return float(run.optimizer.step(closure).detach())  # type: ignore[arg-type, union-attr]

    assert run_closure(ours) == run_closure(theirs)
    end(ours, theirs)


@on_ranks(2)
def test_backward_through_old_weights() -> None:
    """Autograd must see that weights were changed, on ranks that took them from another one too."""
    ours = Run(adamw, divided=True)
    ours.train(2)
    held_back = ours.net.large.weight.square().sum()
    ours.train(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held_back.backward()
    ours.close()


@on_ranks(2)
def test_gradients_that_differ() -> None:
    ours = Run(adamw, divided=True)
    with ours.model.no_sync():
        ours.model(inputs(0)).backward()
    with pytest.raises(RuntimeError, match="the ranks have different gradients, or weights"):
        ours.optimizer.step()
    ours.close(failed=True)
    ours = Run(adamw, divided=True)
    ours.model(inputs(0)).backward()
    if RANK == 1:
        ours.net.large.bias.grad = None
    with pytest.raises(RuntimeError, match="gradients of different parameters"):
        ours.optimizer.step()
    ours.close(failed=True)


@on_ranks(2)
def test_weights_that_differ() -> None:
    """Written into as torch counts, or behind its back."""
    for write in (lambda one: one, lambda one: one.data):
        ours = Run(adamw, divided=True)
        ours.train(1)
        with torch.no_grad():
            written = write(ours.net.large.weight)
            written[7 if written is ours.net.large.weight else slice(None)] += RANK
        ours.optimizer.zero_grad()
        ours.model(inputs(0)).backward()
        with pytest.raises(RuntimeError, match=r"the ranks have different (gradients, or )?weights"):
            ours.optimizer.step()
        ours.close(failed=True)


@on_ranks(2)
def test_hooks_that_come_later() -> None:
    """On one rank is enough: all of them step whole from then on."""
    ours, theirs = pair(adamw, 2)
    seen: list[int] = []
    if RANK == 1:
        ours.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(held(optimizer)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        ours.train(2)
    theirs.train(2)
    said = [str(one.message) for one in caught]
    assert len(said) == (RANK == 0)
    assert all("no effect from here on: AdamW has step hooks" in text for text in said)
    assert seen == ([held(theirs.optimizer)] * 2 if RANK == 1 else [])
    assert "step hooks" in str(ours.update.report())  # type: ignore[union-attr]
    end(ours, theirs)


@on_ranks(2)
def test_learning_rates_that_differ() -> None:
    """As of a ReduceLROnPlateau that follows each rank's own metric: plain ranks then train apart, and so do these."""
    for rate in (0.02, torch.tensor(0.02)):
        ours, theirs = pair(adamw, 2)
        for run in (ours, theirs):
            run.optimizer.param_groups[-1]["lr"] = rate * (1 + RANK)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NoEffectWarning)
            ours.train(1)
        theirs.train(1)
        assert ["some ranks have another learning rate" in str(one.message) for one in caught] == [True] * (RANK == 0)
        end(ours, theirs)


@on_ranks(2)
def test_optimizers_that_stay_whole() -> None:
    def hooked(parameters: Iterable[Tensor]) -> Optimizer:
        optimizer = adamw(parameters)
        if RANK == 0:
            optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    cases: list[tuple[Make, str, str]] = [
        (hooked, "one", "AdamW has step hooks"),
        (lambda p: torch.optim.LBFGS(p), "one", "LBFGS needs all"),
        (adamw, f"host {RANK}", "ranks do not share memory .* each rank is on a machine of its own"),
    ]
    for make, machine, reason in cases:
        with (
            patch.object(sums, "machine", lambda machine=machine: machine),
            pytest.warns(NoEffectWarning, match=f"has no effect: .*{reason.split()[0]}")
            if RANK == 0
            else nullcontext(),
        ):
            ours = Run(make, divided=True)
        assert not ours.update.active
        if make is not cases[1][0]:
            ours.train(1)
            assert len(set(over_ranks(held(ours.optimizer)))) == 1
            assert ours.optimizer.state_dict()["state"]
        ours.close()


@retime.declare_per_parameter
class Failing(torch.optim.SGD):
    """On rank 1, in its third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if RANK == 1 and self.steps == 3:
            if os.environ.get("RETIME_TEST_KILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("rank 1's own mistake")
        return super().step(closure)


def failing(parameters: Iterable[Tensor]) -> Optimizer:
    return Failing(parameters, lr=1e-2, momentum=0.9)


@on_ranks(2)
def test_exception_in_a_step() -> None:
    ours = Run(failing, divided=True)
    state = failing(ours.optimizer.param_groups[0]["params"]).state_dict()
    ours.train(2)
    began = time.monotonic()
    error = (ArithmeticError, "own mistake") if RANK == 1 else (RuntimeError, "rank 1 .* failed")
    with pytest.raises(error[0], match=error[1]):
        ours.train(1)
    ours.update.remove(failed=True)  # type: ignore[union-attr]
    assert time.monotonic() - began < limit_s(10)
    for use in (ours.optimizer.step, ours.optimizer.state_dict, lambda: copy.copy(ours.optimizer)):
        with pytest.raises(RuntimeError, match="load a state into the optimizer"):
            use()
    ours.optimizer.load_state_dict(state)
    ours.optimizer.state_dict()
    ours.reduction.close()
    ours.optimizer.step()


@on_ranks(2)
def test_one_rank_goes_on() -> None:
    """Who fails waits a little for the others; who goes on learns of it in the next step."""
    ours = Run(adamw, divided=True)
    ours.train(2)
    if RANK == 1:
        ours.update.remove(failed=True)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="load a state"):
            ours.optimizer.state_dict()
    else:
        with pytest.raises(RuntimeError, match="rank 1 failed; see its own error"):
            ours.optimizer.step()
        ours.close(failed=True)


@on_ranks(2)
def test_state_that_cannot_be_sent() -> None:
    """On the one rank that updates the parameter."""
    ours = Run(lambda parameters: torch.optim.SGD(parameters, lr=1e-2), divided=True)
    ours.optimizer.state[ours.net.large.weight]["counts"] = defaultdict(lambda: 0)
    with pytest.raises(RuntimeError, match=r"^SGD keeps state that cannot be sent .*lambda.*: leave out update"):
        ours.train(1)
    ours.close(failed=True)


@on_ranks(2)
def test_all_ranks_fail() -> None:
    ours, theirs = pair(adamw, 2)
    ours.update.remove(failed=True)  # type: ignore[union-attr]
    assert_same_state(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    ours.reduction.close()
    theirs.close()


def saves(path: str) -> None:
    ours = Run(adamw, divided=True)
    ours.train(3)
    state = ours.update.state_dict()  # type: ignore[union-attr]
    if RANK == 0:
        torch.save({"model": ours.net.state_dict(), "optimizer": state}, path)
    ours.close()


def resumes(path: str) -> None:
    saved = torch.load(path)
    ours, theirs = Run(adamw, divided=True), Run(adamw, divided=False)
    for run in (ours, theirs):
        run.net.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        run.train(2)
    assert sum(over_ranks(held(ours.optimizer))) == held(theirs.optimizer)
    end(ours, theirs)


class Net(LightningModule):
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def trainer() -> Trainer:
    strategy = CPUAccumulateStrategy(update_on_host=True, bucket_cap_mb=0.02, timeout=MINUTES)
    return quiet_trainer(devices=RANKS, strategy=strategy, max_epochs=1, use_distributed_sampler=False)


def fit(made: Trainer, make: Make) -> None:
    batches = [torch.randn(4, 64) for _ in range(5)]
    made.fit(Net(make), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def fit_reports() -> None:
    runner = trainer()
    fit(runner, adamw)
    update = runner.strategy.report().update  # type: ignore[attr-defined]
    assert "this rank updates" in str(runner.strategy.report())  # type: ignore[attr-defined]
    print(f"rank {RANK}: {update.steps} {update.state_bytes} {update.whole_state_bytes} {held(runner.optimizers[0])}")


def fit_fails() -> None:
    runner, began = trainer(), time.monotonic()
    try:
        fit(runner, failing)
    except Exception as error:
        print(f"rank {RANK}: {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}", flush=True)
    os._exit(0)


def test_a_state_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    for ranks, check in ((3, "saves"), (2, "resumes")):
        for run in run_ranks(ranks, __file__, case := f"{check}|{tmp_path / 'state.pt'}"):
            said_in(run, case)


def test_a_fit_reports_what_a_rank_holds_and_ends_with_the_whole_state() -> None:
    reports = [
        re.findall(r"rank \d: (\d+) (\d+) (\d+) (\d+)", run.stdout)
        for run in run_ranks(2, __file__, "fit_reports", joined=False)
    ]
    counts = [[int(one) for one in lines[0]] for lines in reports]
    (steps, mine, whole, at_end), (_, other, _, other_at_end) = counts
    assert steps == 5
    assert mine + other == whole == at_end == other_at_end
    assert max(mine, other) < 0.6 * whole


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_rank_that_is_lost_in_its_update_ends_the_others_fit(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if killed:
        monkeypatch.setenv("RETIME_TEST_KILL", "1")
    first, second = run_ranks(2, __file__, "fit_fails", joined=False)
    reason = "ended" if killed else "failed or ended"
    lost = re.findall(rf"rank 0: ([\d.]+) s: RankLostError: rank 1 \(process \d+\) {reason}", first.stdout)
    assert len(lost) == 1, first.stdout + first.stderr[-3000:]
    assert float(lost[0]) < limit_s(30)
    assert ("rank 1's own mistake" in second.stdout) is not killed


def test_parameters_on_a_device_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="takes parameters on processors, not on meta"):
        HostUpdate(torch.optim.SGD([parameter]), [parameter])
