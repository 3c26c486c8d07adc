"""Optimizers of other libraries: by small ones that update as theirs do, and by their own where these are installed.

The lines are those of the table in mechanisms/fusion/README.md.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from retime import declare_per_parameter, fuse_optimizer
from retime.foundations.lazy_updates import optimizers
from support.fusion import Run, assert_same, both, network, train
from support.small_optimizers import Averaging, CountingInATensor, EightBit, LowRank

MODES = pytest.mark.parametrize("mode", ["backward", "forward"])


@pytest.fixture(autouse=True)
def _declared_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_declared", set())


@MODES
@pytest.mark.parametrize("kind", [Averaging, CountingInATensor, LowRank, EightBit])
def test_declared_optimizers_keep_their_bits(kind: Callable[[Any], Optimizer], mode: str) -> None:
    def two_groups(parameters: Any) -> Optimizer:
        every = list(parameters)
        return kind([{"params": every[:3], "lr": 0.1}, {"params": every[3:]}])

    declare_per_parameter(kind)  # type: ignore[type-var]
    assert both(mode, two_groups, bucket_bytes=1).fused_updates >= 35


@MODES
def test_modes_of_an_optimizer_find_its_updates_done(mode: str) -> None:
    def validate(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 3:
            optimizer.eval()
            seen.append(sum(parameter.detach().sum().item() for parameter in model.parameters()))
            optimizer.eval(to=True)

    declare_per_parameter(Averaging)
    seen: list[float] = []
    both(mode, Averaging, each_step=validate)
    assert seen[0] == seen[1]


@MODES
def test_muon(mode: str) -> None:
    def muon(parameters: Any) -> Optimizer:
        return optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02)

    assert both(mode, muon).fused_updates == {"backward": 20, "forward": 24}[mode]


class Lomo(Optimizer):
    """As LOMO: hooks update while the backward pass runs; ``step`` is not there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def fused_backward(self, loss: Tensor, lr: float) -> None: ...


class GradientRelease(CountingInATensor):
    """As optimi's, told to update by hooks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, gradient_release=True)


class Stochastic(EightBit):
    """As torchao's, told to round to bf16 by chance."""

    bf16_stochastic_round = True


class ByNumber(EightBit):
    """As bitsandbytes', where somebody has set another number of bits for an embedding."""

    class mng:  # noqa: N801
        module_weight_config_triple = ((nn.Embedding(2, 2), "weight", {"optim_bits": 32}),)


@MODES
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Lomo, "Lomo has no step of its own: it updates elsewhere"),
        (GradientRelease, "GradientRelease has gradient_release=True"),
        (Stochastic, "Stochastic has bf16_stochastic_round=True, which draws random numbers"),
        (ByNumber, "ByNumber finds settings of GlobalOptimManager by a parameter's number"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_although_it_is_declared(
    kind: Callable[[Any], Optimizer], says: str, mode: str
) -> None:
    model = network()
    declare_per_parameter(kind)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=says):
        fuse_optimizer(model, kind(model.parameters()), mode)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


# The libraries' own, where they are installed.


def installed(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(pytest.importorskip(module, reason=f"needs {module}"), name)


def matrices(parameters: Any, **more: Any) -> list[dict[str, Any]]:
    every = list(parameters)
    flat = [one for one in every if one.ndim != 2]
    return [{"params": flat}, {"params": [one for one in every if one.ndim == 2], **more}]


def in_train_mode(optimizer: Any) -> Optimizer:
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


GALORE = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
LIBRARIES: dict[str, tuple[str, str, Callable[[Any, Any], Optimizer]]] = {
    "adafactor": ("transformers", "Adafactor", lambda kind, p: kind(p)),
    "adafactor with a rate": (
        *("transformers", "Adafactor"),
        lambda kind, p: kind(p, lr=0.01, relative_step=False, scale_parameter=False, beta1=0.9, weight_decay=0.1),
    ),
    "schedule-free AdamW": (
        "schedulefree",
        "AdamWScheduleFree",
        lambda kind, p: in_train_mode(kind(p, lr=0.01, warmup_steps=3)),
    ),
    "schedule-free RAdam": ("schedulefree", "RAdamScheduleFree", lambda kind, p: in_train_mode(kind(p, lr=0.01))),
    "schedule-free SGD": (
        "schedulefree",
        "SGDScheduleFree",
        lambda kind, p: in_train_mode(kind(p, lr=0.1, warmup_steps=3)),
    ),
    "GaLore AdamW": ("galore_torch", "GaLoreAdamW", lambda kind, p: kind(matrices(p, **GALORE), lr=0.01)),
    "GaLore Adafactor": ("galore_torch", "GaLoreAdafactor", lambda kind, p: kind(matrices(p, **GALORE))),
    "optimi": ("optimi", "StableAdamW", lambda kind, p: kind(p, lr=0.01)),
    "bitsandbytes": ("bitsandbytes.optim", "AdamW8bit", lambda kind, p: kind(p, lr=0.01, min_8bit_size=16)),
}


@MODES
@pytest.mark.parametrize("case", LIBRARIES)
@pytest.mark.filterwarnings("ignore")
def test_those_of_libraries_keep_their_bits(case: str, mode: str) -> None:
    module, name, make = LIBRARIES[case]
    kind = installed(module, name)
    declare_per_parameter(kind)

    def run(mode: str | None) -> Run:
        one = train(mode, lambda p: make(kind, p))
        for state in one.state["state"].values():  # GaLore's and bitsandbytes' are no tensors
            if "projector" in state:
                state["projector"] = state["projector"].ortho_matrix
            state |= state.pop("__bnb_optimizer_quant_state__", {})
        return one

    if case == "optimi" and mode == "backward":
        with pytest.raises(ValueError, match=r"zero_grad of this StableAdamW is not torch's own.*mode='forward'"):
            run(mode)
        return
    ours = run(mode)
    assert_same(run(None), ours)
    assert ours.report.fused_updates >= 35


@MODES
@pytest.mark.filterwarnings("ignore")
def test_lomo(mode: str) -> None:
    model = network()
    with pytest.raises(ValueError, match="Lomo has no step of its own"):
        fuse_optimizer(model, installed("lomo_optim", "Lomo")(model), mode)
