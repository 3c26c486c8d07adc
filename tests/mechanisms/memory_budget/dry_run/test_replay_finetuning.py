"""Dry runs where some parameters are frozen, thawed later, or in no optimizer: states and gradients to the byte."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.memory_budget.dry_run.run import Gradients, TrainingStep, profile_step
from retime.schedules.budget import BlockKind, Phase

SAMPLES = 8
AFTER_FORWARD: Gradients = "freed after forward"


class Finetuned(nn.Module):
    """A backbone, a head, and a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
        self.unused = nn.Linear(300, 300)
        self.head = nn.Linear(100, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.backbone(values))


def step_of(model: nn.Module, optimizers: list[torch.optim.Optimizer], gradients: Gradients) -> TrainingStep:
    values = torch.randn(SAMPLES, 100)
    return TrainingStep(model, values, SAMPLES, lambda part: model(part).sum(), optimizers, gradients=gradients)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(SAMPLES, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def nbytes(*modules: nn.Module) -> int:
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_states_of_thawed_parameters_are_there(kind: str, real: bool) -> None:
    options: dict[str, Any] = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    model = Finetuned()
    model.backbone.requires_grad_(False)
    optimizer = getattr(torch.optim, kind)([*model.head.parameters(), *model.unused.parameters()], **options)
    train(model, optimizer)
    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.backbone.parameters())})
    before = {id(value): value.clone() for state in optimizer.state.values() for value in state.values()}
    profile = profile_step(step_of(model, [optimizer], AFTER_FORWARD), real=real)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(value, before[id(value)]) for value in kept)
    assert len(kept) == len(before)

    train(model, optimizer)

    assert profile.bytes_by_kind[BlockKind.STATE] == state_bytes(optimizer)  # none for the unused layer
    later = profile_step(step_of(model, [optimizer], AFTER_FORWARD), real=real)
    assert (profile.peak_bytes, profile.resident_bytes) == (later.peak_bytes, later.resident_bytes)


def test_nothing_is_run_more_often_where_states_are_complete_or_none_are_there() -> None:
    """The pass that tells which parameters get gradients costs as much as a step."""
    model = Finetuned()
    del model.unused
    passes = []
    model.head.register_forward_hook(lambda *_: passes.append(1))
    optimizer = torch.optim.Adam(model.parameters())
    profile_step(step_of(model, [optimizer], AFTER_FORWARD))
    assert len(passes) == 1
    train(model, optimizer)
    profile_step(step_of(model, [optimizer], AFTER_FORWARD))
    assert len(passes) == 3


@pytest.mark.parametrize("gradients", ["freed", AFTER_FORWARD])
@pytest.mark.parametrize("sub_batch", [SAMPLES, 4])
def test_gradients_that_no_optimizer_frees_are_there_at_all_times(gradients: Gradients, sub_batch: int) -> None:
    model = Finetuned()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    profile = profile_step(step_of(model, [optimizer], gradients), sub_batch)
    sizes = [size for size, one in zip(profile.held_bytes(), profile.trace.operations, strict=True)
            if one.phase is Phase.BACKWARD]  # fmt: skip
    frozen = Finetuned()
    frozen.backbone.requires_grad_(False)
    without = profile_step(step_of(frozen, [torch.optim.SGD(frozen.head.parameters(), lr=0.1)], gradients), sub_batch)
    more = sizes[0] - next(
        size
        for size, one in zip(without.held_bytes(), without.trace.operations, strict=True)
        if one.phase is Phase.BACKWARD
    )
    activations = 2 * sub_batch * 100 * 4
    assert nbytes(model.backbone) <= more <= nbytes(model.backbone) + activations  # and none for the unused layer


def test_all_gradients_go_where_nobody_says_whose_they_are() -> None:
    model = Finetuned()
    mine, nobodys = (step_of(model, ones, AFTER_FORWARD) for ones in ([torch.optim.SGD(model.parameters())], []))
    assert profile_step(mine).peak_bytes == profile_step(nobodys).peak_bytes


def test_a_step_that_reads_values_is_followed_by_real_runs() -> None:
    model = Finetuned()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

    def reads(part: Tensor) -> Tensor:
        output = model(part).sum()
        float(output.detach())
        return output

    real = profile_step(TrainingStep(model, torch.randn(2, 100), 2, reads, [optimizer]), real=True)
    plain = profile_step(TrainingStep(model, torch.randn(2, 100), 2, lambda part: model(part).sum(), [optimizer]))
    assert real.peak_bytes == plain.peak_bytes
