"""Both fusions give the plain loop's bits, whatever the optimizer and its flags."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from retime import declare_per_parameter, fuse_optimizer
from support.fusion import both, network, train

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "maximize": lambda p: optim.SGD(p, lr=0.001, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw-foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_per_parameter_optimizer_keeps_its_bits(name: str, mode: str) -> None:
    report = both(mode, OPTIMIZERS[name])
    assert report.fused_updates == {"backward": 40, "forward": 48}[mode]  # backward's first step counts uses


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize("before", [True, False], ids=["scheduler-first", "fusion-first"])
def test_schedulers_act_on_the_next_step_only(mode: str, before: bool) -> None:
    def loop(mode: str | None) -> Any:
        model = network()
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        make = lambda: optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        scheduler = make() if before else None
        fusion = fuse_optimizer(model, optimizer, mode) if mode else None
        scheduler = scheduler or make()
        for _ in range(5):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if fusion:
            fusion.remove()
        assert scheduler.get_last_lr() == [0.1 * 0.5**5]
        return model.state_dict()

    plain, ours = loop(None), loop(mode)
    assert all(torch.equal(plain[k], ours[k]) for k in plain)


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_groups_keep_their_own_hyper_parameters_and_may_join_later(mode: str) -> None:
    def two_groups(parameters: Any) -> Optimizer:
        parameters = list(parameters)
        return optim.AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:4]}], lr=0.01)

    def join(model: nn.Module, optimizer: Optimizer, i: int) -> None:
        if i == 1:
            optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.05, "betas": (0.5, 0.9)})
        if i == 3:
            optimizer.param_groups[0]["lr"] = 0.02

    assert both(mode, two_groups, each_step=join).fused_updates > 0


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_parameters_frozen_and_unfrozen_on_the_way(mode: str) -> None:
    def freeze(model: nn.Module, optimizer: Optimizer, i: int) -> None:
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(i % 3 == 2)

    def frozen() -> nn.Module:
        model = network()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    both(mode, make=frozen, each_step=freeze)


@pytest.mark.parametrize(("mode", "set_to_none"), [("backward", True), ("forward", True), ("backward", False)])
def test_sparse_gradients(mode: str, set_to_none: bool) -> None:
    """Also where zeros take their place, which are sparse."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 8, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.abs().mul(5).long().clamp(max=19))  # type: ignore[no-any-return]

    sparse = lambda p: optim.SparseAdam(list(p), lr=0.1)  # noqa: E731
    assert both(mode, sparse, make=Bag, set_to_none=set_to_none).fused_updates > 0


class HalfSigned(optim.SGD):
    """A step of somebody's own, per parameter as it happens."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / 2)


def test_a_step_of_ones_own_is_refused_until_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    from retime.foundations.lazy_updates import optimizers as support

    monkeypatch.setattr(support, "_declared", set())
    make = lambda p: HalfSigned(p, lr=0.01)  # noqa: E731
    with pytest.raises(ValueError, match=r"declare_per_parameter\(HalfSigned\)"):
        train("backward", make)
    declare_per_parameter(HalfSigned)
    for mode in ("backward", "forward"):
        assert both(mode, make).fused_updates > 0


def test_subclass_that_changes_no_method_needs_no_declaration() -> None:
    class Renamed(optim.AdamW):
        pass

    assert train("backward", lambda p: Renamed(p, lr=0.01)).report.fused_updates > 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: optim.LBFGS(p), "LBFGS needs all parameters"),
        (lambda p: optim.Adam(p, differentiable=True), "differentiable=True"),
    ],
)
def test_global_optimizers_are_refused(make: Any, text: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=text):
        fuse_optimizer(model, make(model.parameters()))


def test_step_hooks_are_refused() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        fuse_optimizer(model, optimizer)


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_bytes_may_have_a_unit(mode: str) -> None:
    model = network()
    fusion = fuse_optimizer(model, optim.SGD(model.parameters(), lr=0.1), mode, bucket_bytes="1MiB")
    assert fusion.bucket_bytes == 2**20
    fusion.remove()
