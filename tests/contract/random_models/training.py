"""The training loop, by itself: optimizers, schedules, and what a user may do between two steps.

A mechanism takes part through `Way`, whose methods are the plain ones.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LRScheduler, OneCycleLR, StepLR

from contract.random_models.layers import Batch
from contract.random_models.losses import loss_of
from contract.random_models.model import RandomModel, batches, build
from contract.random_models.spec import Spec, Training
from contract.record import snapshot

SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "step": lambda optimizer, steps: StepLR(optimizer, 1, 0.5),
    "lambda": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
    "exponential": lambda optimizer, steps: ExponentialLR(optimizer, 0.7),
    "one_cycle": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps + 1, cycle_momentum=False),
}
CLIP_NORM, CLIP_VALUE = 0.2, 0.02


def make_optimizer(model: nn.Module, training: Training) -> Optimizer:
    """Over the parameters that are trained, in as many groups as wanted; the second group has another learning rate."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if training.left_out:
        parameters = [p for index, p in enumerate(parameters) if not index or index % training.left_out]
    groups = [parameters[index :: training.groups] for index in range(training.groups)]
    lr = training.options.get("lr", 0.01)
    chosen = [
        {"params": group, "lr": lr / (1 + index)} if index else {"params": group} for index, group in enumerate(groups)
    ]
    kind = getattr(torch.optim, training.optimizer)
    return kind([group for group in chosen if group["params"]], **training.options)


def make_schedule(optimizer: Optimizer, training: Training) -> LRScheduler | None:
    return SCHEDULES[training.schedule](optimizer, training.steps) if training.schedule else None


Order = Callable[[Tensor], Tensor]
"""Puts the samples of a batch in another order; what is computed stays the same, but for rounding."""


def as_given(samples: Tensor) -> Tensor:
    """No other order."""
    return samples


class Way:
    """How steps run; here the plain way.

    Attributes:
        on: whether the mechanism has done anything that a plain loop does not.
        rounds: whether it has summed in another order than a plain loop, where that is allowed.
        note: what the mechanism says of itself, where it was not on.
        steps: optimizer steps begun.
        model: what is trained.
        told: names of logged numbers that a warning says to differ.
        by_value: names of those that are judged by their values in the first batch.
    """

    on = False
    rounds = True
    note = ""
    steps = 0
    model: nn.Module
    told: frozenset[str] = frozenset()
    by_value: frozenset[str] = frozenset()

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        """Before the first step."""

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        """Forward and backward pass of one of `share` batches of a step; returns the loss, undivided and detached."""
        loss = compute(batch)
        (loss / share).backward()
        return loss.detach()

    def clip(self, model: nn.Module, training: Training) -> None:
        parameters = [p for p in model.parameters() if p.grad is not None]
        if training.clip == "value":
            nn.utils.clip_grad_value_(parameters, CLIP_VALUE)
        elif training.clip == "norm":
            nn.utils.clip_grad_norm_(parameters, CLIP_NORM)

    def gradients(self, model: nn.Module) -> Any:
        """What the loop sees of the gradients before it clips."""
        return {name: snapshot(p.grad) for name, p in model.named_parameters()}

    def end(self) -> None:
        """After the last step: flush, note what was done, take everything off."""


def train(spec: Spec, way: Way, order: Order = as_given) -> dict[str, Any]:
    """The whole run; returns what it left behind."""
    training = spec.training
    model = build(spec)
    optimizer = make_optimizer(model, training)
    schedule = make_schedule(optimizer, training)
    given = iter([Batch(*map(order, batch)) for batch in batches(spec)])
    left: dict[str, Any] = {"losses": [], "gradients": [], "seen": []}
    keeper = Between(model, optimizer, left["seen"])
    torch.manual_seed(spec.seed + 1)

    def compute(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if training.autocast else nullcontext():
            return loss_of(model, training.loss, batch)

    way.model = model
    try:
        way.begin(model, optimizer, spec)
        for step in range(training.steps):
            model.at_step(step)
            if training.zero == "before":
                optimizer.zero_grad(set_to_none=training.to_none)
            for part in range(training.accumulate):
                last = part == training.accumulate - 1
                left["losses"].append(way.pass_(compute, next(given), training.accumulate, last))
            if training.reads_gradients:
                left["gradients"].append(way.gradients(model))
            way.clip(model, training)
            way.steps = step + 1
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if training.zero == "after":
                optimizer.zero_grad(set_to_none=training.to_none)
            for when, name in training.between:
                if when == step:
                    getattr(keeper, name)()
    finally:
        way.end()
    return left | snapshot({"weights": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


class Between:
    """What a user may do to the model or the optimizer between two steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, seen: list[Any]) -> None:
        self.model, self.optimizer, self.seen = model, optimizer, seen
        self.average: dict[str, Tensor] = {}

    def ema(self) -> None:
        """Weights' moving average, and at the second call it takes their place."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in self.average:
                    p.copy_(self.average[name].mul_(0.5).add_(p, alpha=0.5))
                else:
                    self.average[name] = p.detach().clone()
        self.seen.append(snapshot(self.average))

    def clamp(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-0.4, 0.4)

    def clamp_data(self) -> None:
        for p in self.model.parameters():
            p.data.clamp_(-0.4, 0.4)

    def freeze(self) -> None:
        """Every third parameter."""
        for p in list(self.model.parameters())[2::3]:
            p.requires_grad_(False)

    def thaw(self) -> None:
        for p in self.model.parameters():
            if p.is_floating_point():
                p.requires_grad_(True)

    def reload_model(self) -> None:
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))

    def reload_optimizer(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def lower_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def add_group(self) -> None:
        """Parameters that are in no group yet join."""
        parameters = {p for group in self.optimizer.param_groups for p in group["params"]}
        new = [p for p in self.model.parameters() if p not in parameters and p.requires_grad]
        if new:
            self.optimizer.add_param_group({"params": new})

    def evaluate(self) -> None:
        """A pass in eval mode, without gradients."""
        self.model.eval()
        with torch.no_grad():
            self.seen.append(snapshot([p.norm() for p in self.model.parameters()]))
        self.model.train()

    def copy(self) -> None:
        self.seen.append(snapshot(copy.deepcopy(self.model).state_dict()))

    def reset_state(self) -> None:
        self.optimizer.state.clear()

    def change_class_weights(self) -> None:
        self.model.class_weights.mul_(2.0)
