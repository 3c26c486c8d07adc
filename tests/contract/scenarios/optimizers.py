"""Every optimizer torch ships, odd parameter groups, and optimizers that torch does not know."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn, optim

from contract.bench import Bench
from contract.models import FEATURES, Net, Optimizer, adam, mlp
from contract.registry import add, fits, scenario
from contract.traits import CUSTOM_OPTIMIZER, LBFGS, SPARSE, STEP_HOOK

SHIPPED = {
    "sgd": partial(optim.SGD, lr=0.05),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_fused": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, lr=0.02, weight_decay=0.01),
    "adamw_fused": partial(optim.AdamW, lr=0.02, fused=True),
    "adamw_foreach": partial(optim.AdamW, lr=0.02, foreach=True),
    "adam_tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.02), foreach=False),
    "amsgrad": partial(optim.Adam, lr=0.02, amsgrad=True),
    "maximize": partial(optim.AdamW, lr=0.02, maximize=True),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adamax": partial(optim.Adamax, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.05, t0=2),
    "rprop": partial(optim.Rprop, lr=0.01),
    "adafactor": partial(optim.Adafactor, lr=0.02),
}


def _fit_with(optimizer: Any, bench: Bench) -> None:
    bench.fit(Net(optimizer=optimizer))


ONE_IS_ENOUGH = ("nesterov", "amsgrad", "maximize", "adagrad", "adadelta", "nadam", "radam", "adamax", "asgd", "rprop")
WHY = "what it makes of a gradient is no matter of ranks; random models on ranks draw it too"

for _name, _optimizer in SHIPPED.items():
    add(f"optimizer_{_name}", partial(_fit_with, _optimizer), single=WHY if _name in ONE_IS_ENOUGH else "")


@scenario()
def optimizer_muon(bench: Bench) -> None:
    """Muon takes matrices only, so the biases stay untrained."""
    net = nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.Tanh(), nn.Linear(8, FEATURES, bias=False))
    bench.fit(Net(net, optimizer=partial(optim.Muon, lr=0.02)))


fits(LBFGS, optimizer_lbfgs=lambda bench: bench.fit(Net(optimizer=partial(optim.LBFGS, lr=0.1, max_iter=3))))

fits(
    LBFGS,
    single="ranks have losses of their own, so each would search in another way and wait for the rest",
    # It reads the loss that its closure returns. In float64, as it divides by differences of gradients.
    optimizer_line_search=lambda bench: bench.fit(
        Net(optimizer=partial(optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")), precision="64-true"
    ),
)


class Words(Net):
    """Predicts from a sparse embedding: its gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, FEATURES, sparse=True), partial(optim.SparseAdam, lr=0.05))

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs.abs().mul(3).long().clamp(max=4)).sum(1), targets)


fits(SPARSE, optimizer_sparse_adam=lambda bench: bench.fit(Words()))


class Grouped(Net):
    def configure_optimizers(self) -> Optimizer:
        first, last = self.net[0], self.net[2]
        return optim.AdamW(
            [
                {"params": [first.weight], "lr": 0.01, "betas": (0.8, 0.9)},
                {"params": [first.bias, last.bias], "weight_decay": 0.0},
                {"params": [last.weight], "lr": 0.03, "amsgrad": True},
            ],
            lr=0.02,
        )


class Unfreeze(BaseFinetuning):
    """Trains the last layer first; the first layer joins as a new parameter group in epoch 1."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01, train_bn=True)


fits(
    single="DDP does not synchronise a parameter that was frozen when it was built",
    groups_added_later=lambda bench: bench.fit(Net(), callbacks=[Unfreeze()], max_epochs=3),
)


class SignDescent(Optimizer):
    """An optimizer only this test knows."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad.sign())
        return loss


class NormalisedDescent(optim.SGD):
    """Subclasses an optimizer torch ships, but its update couples all parameters."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(length)
        super().step()
        return loss


fits(
    CUSTOM_OPTIMIZER,
    optimizer_custom=lambda bench: bench.fit(Net(optimizer=SignDescent)),
    optimizer_subclass_with_own_step=lambda bench: bench.fit(Net(optimizer=partial(NormalisedDescent, lr=0.05))),
)


class Tracked(Net):
    """Hooks the step the way a monitoring library does: once before and once after each step."""

    def configure_optimizers(self) -> Optimizer:
        optimizer = adam(self.parameters())
        self.calls = [0, 0]
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        return optimizer

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.calls[0] += 1

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.calls[1] += 1
        self.trace.append({"bias after step": self.net[2].bias.detach().clone()})


@scenario(STEP_HOOK)
def optimizer_step_hooks(bench: Bench) -> None:
    module = Tracked()
    bench.fit(module)
    bench.keep("calls", module.calls)


class Wide(Net):
    """Parameters of odd kinds: a scalar, an empty one, one in another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.layout = nn.Parameter(torch.full((FEATURES, FEATURES), 0.1).tril().t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) * self.scale + inputs @ self.layout + self.empty.sum()


fits(
    parameter_groups=lambda bench: bench.fit(Grouped()),
    parameters_of_odd_shapes=lambda bench: bench.fit(Wide()),
    # A deep net: many parameters, one group, so that a wrong narrowing of groups would reorder the state.
    optimizer_state_survives_schedule=lambda bench: bench.fit(
        Net(nn.Sequential(*[nn.Sequential(mlp(), nn.LayerNorm(FEATURES)) for _ in range(3)]))
    ),
)
