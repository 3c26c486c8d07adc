"""Deferred weight gradients on random models and trainings: the same bits, or an error that sets nothing."""

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from retime.foundations.weight_gradients import WeightGradientDeferral
from support.deferral_models import WIDTH, RandomModel

SEEDS = int(os.environ.get("RETIME_RANDOM", "30"))
STEPS = 7
Step = tuple[dict[str, Tensor | None], list[str]]


def train(seed: int, *, deferred: bool, operations: list[int] | None = None) -> tuple[list[Step], str]:
    """Gradients and hooks fired of each step, and the error that ended the training, if one did."""
    rng = random.Random(-seed - 1)
    model = RandomModel(seed, operations)
    deferral = WeightGradientDeferral(model) if deferred else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    freezes, accumulates, to_none = rng.random() < 0.4, rng.choice([1, 1, 2]), rng.random() < 0.7
    input_learns = rng.choice([None, True, False, False])
    steps: list[Step] = []
    for number in range(STEPS):
        k = rng.choice([0, 1, 2, 3, 99, 99])
        some = [[rng.choice(list(model.parameters()))], rng.choice([*model.parts, model.head]).parameters()]
        thawed, which, twice, learns = rng.random() < 0.5, rng.randrange(2), rng.random() < 0.1, rng.random() < 0.5
        if freezes and number > 1:
            for parameter in some[which]:
                parameter.requires_grad_(thawed)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
        x.requires_grad_(learns if input_learns is None else input_learns)
        fired.clear()
        torch.manual_seed(number)
        before = gradients(model, x)
        try:
            loss = model(x, number).square().mean() + model.losses()
            if deferral is not None:
                deferral.k = k
                deferral.watch(loss)
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()
        except RuntimeError as error:
            if "No gradient has been set" in str(error) and not twice:
                assert not differing(before, gradients(model, x))
            return steps, str(error)
        steps.append((gradients(model, x), sorted(fired)))
        if number % accumulates == 0:
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return steps, ""


def gradients(model: RandomModel, x: Tensor) -> dict[str, Tensor | None]:
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return {name: None if grad is None else grad.detach().clone() for name, grad in gradients.items()}


def differing(ours: dict[str, Tensor | None], plain: dict[str, Tensor | None]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if a is None or b is None or a.is_sparse != b.is_sparse:
            return a is b
        return torch.equal(a.to_dense().nan_to_num(), b.to_dense().nan_to_num())

    return [name for name, gradient in ours.items() if not same(gradient, plain[name])]


def difference(seed: int, operations: list[int] | None = None) -> str:
    """What differs between plain and deferred training; nothing is as it should be."""
    plain, plain_error = train(seed, deferred=False, operations=operations)
    ours, error = train(seed, deferred=True, operations=operations)
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=False)):
        if found := differing(mine[0], theirs[0]):
            return f"step {number}: gradients of {', '.join(found)}"
        if mine[1] != theirs[1]:
            return f"step {number}: hooks fired for {mine[1]}, and not for {theirs[1]}"
    if "No gradient has been set" in error:
        return ""
    return (
        ""
        if bool(error) == bool(plain_error)
        else f"ended by {error or 'nothing'}, and not by {plain_error or 'nothing'}"
    )


@pytest.mark.filterwarnings("ignore::retime.DifferenceWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_as_plain_autograd(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("passes", "cut"):
        monkeypatch.setattr(
            f"retime.foundations.weight_gradients.{module}.SMALL_BYTES", random.Random(seed).choice([0, 0, 200])
        )
    differing = difference(seed)
    if differing:
        names = [name for name, _ in RandomModel(seed).ops]
        keep = list(range(len(names)))
        for operation in list(keep):  # a minimal model says more
            fewer = [number for number in keep if number != operation]
            keep = fewer if difference(seed, fewer) else keep
        pytest.fail(
            f"seed {seed}: {[names[number] for number in keep]}: {difference(seed, keep)}; the whole: {differing}"
        )
