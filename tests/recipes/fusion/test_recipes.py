"""The optimizer-fusion recipes' parts: variants compute the same, gradients are counted, the formula is fitted."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from retime.recipes.core.build import KernelUnavailable, build, build_batches, build_optimizer, loss_of
from retime.recipes.core.trainer_loop import GradientBytes, digest, train
from retime.recipes.fusion.figures import StepTimes, fit_speedup
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.trainer import Distributed, Targets, largest_layer_bytes, trainer_run
from retime.recipes.fusion.variants import VARIANTS, BareLoop, choose_variants, kernel_flags
from retime.recipes.models import mlp

CPU = torch.device("cpu")
DATA = {"_target_": "retime.recipes.data.synthetic_vectors", "features": 8, "classes": 8}
ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "lr": 0.01}
LAYERS, WIDTH = 3, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp(LAYERS, WIDTH)


def weights_after(variant: str, steps: int = 4) -> list[torch.Tensor]:
    (batch,) = build_batches(DATA, 4, 1)
    loop = BareLoop(VARIANTS[variant], model(), batch, ADAMW)
    for _ in range(steps):
        loop.step()
    if variant.startswith("retime_forward"):
        for parameter in loop.model.parameters():
            parameter.detach().clone()  # reading a parameter applies its deferred update
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


@pytest.mark.parametrize(
    ("variant", "reference"),
    [
        ("post_accumulate_hook", "fused"),
        ("kernel_in_hooks", "fused"),
        ("retime_backward", "fused"),
        ("retime_forward", "fused"),
        ("retime_backward_default", "baseline"),
        ("retime_forward_default", "baseline"),
    ],
)
def test_variants_of_one_kernel_give_the_same_bits(variant: str, reference: str) -> None:
    for ours, plain in zip(weights_after(variant), weights_after(reference), strict=True):
        assert torch.equal(ours, plain)


def test_the_bound_changes_nothing() -> None:
    for after, before in zip(weights_after("no_update"), model().parameters(), strict=True):
        assert torch.equal(after, before)


def test_kernels_are_chosen_or_missing() -> None:
    rmsprop = {"_target_": "torch.optim.RMSprop", "lr": 0.01}
    assert kernel_flags("best", ADAMW, CPU) == {"fused": True}
    assert kernel_flags("best", rmsprop, CPU) == {}
    assert kernel_flags("default", ADAMW, CPU) == {}
    with pytest.raises(KernelUnavailable, match="RMSprop takes no fused="):
        build_optimizer(rmsprop, model().parameters(), {"fused": True})
    with pytest.raises(ValueError, match="'quick' is unknown: choose from baseline"):
        choose_variants(["quick"])


def test_build_refuses_arguments_the_target_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"mlp\(depth, .*unexpected keyword argument 'dpeth'"):
        build({"_target_": "retime.recipes.models.mlp", "dpeth": 3})
    with pytest.raises(ValueError, match="has no _target_"):
        build({"depth": 3})
    nested = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Flatten"}]}
    assert isinstance(build(nested)[0], nn.Flatten)


def test_batches_start_again_at_the_end_of_the_data() -> None:
    first, second = build_batches({**DATA, "length": 4}, 3, 2)
    assert torch.equal(second[0][1], first[0][0])


def test_loss_takes_vectors_sentences_and_maps() -> None:
    classes = torch.zeros(2, 3, 3, dtype=torch.long)
    assert loss_of(torch.zeros(2, 5), classes[:, 0, 0]).item() == pytest.approx(torch.tensor(5.0).log().item())
    assert loss_of(torch.zeros(2, 3, 5), classes[:, 0]).item() == pytest.approx(torch.tensor(5.0).log().item())
    assert loss_of(torch.zeros(2, 5, 3, 3), classes).item() == pytest.approx(torch.tensor(5.0).log().item())


@pytest.mark.parametrize(("variant", "layers_alive"), [("fused", LAYERS), ("post_accumulate_hook", 1)])
def test_gradients_alive_are_counted_by_storage(variant: str, layers_alive: int) -> None:
    (batch,) = build_batches(DATA, 4, 1)
    loop = BareLoop(VARIANTS[variant], model(), batch, ADAMW)
    watch = GradientBytes(loop.model.parameters())
    loop.step()
    # a hook per parameter frees the weight's gradient before or after the bias's arrives: at most one layer
    assert watch.peak <= layers_alive * LAYER_BYTES
    assert watch.peak > (layers_alive - 1) * LAYER_BYTES
    watch.peak = 0
    watch.remove()
    loop.step()
    assert watch.peak == 0


def test_formula_is_found_again_in_times_that_follow_it() -> None:
    sizes = [1, 4, 16]
    whole = [3.0 * size + 20.0 for size in sizes]
    fit = fit_speedup(sizes, whole, {"backward": [ms - 5.0 for ms in whole], "forward": [ms - 2.0 for ms in whole]})
    assert fit.grad_ms == pytest.approx(3.0)
    assert fit.opt_ms == pytest.approx(20.0)
    assert fit.saved_ms == pytest.approx({"backward": 5.0, "forward": 2.0})
    assert fit.worst_error == pytest.approx(0.0, abs=1e-9)
    assert fit.speedup("backward", 4) == pytest.approx(32 / 27)
    with pytest.raises(ValueError, match="at least two batch sizes"):
        fit_speedup([4], [1.0], {})


@pytest.mark.parametrize("recipe", [Targets, Distributed])
@pytest.mark.parametrize("variant", ["no_update", "post_accumulate_hook", "retime_backward_default", "fuzed"])
def test_what_no_trainer_runs_is_refused_before_anything_is_measured(recipe: type[StepTimes], variant: str) -> None:
    with pytest.raises(
        ValueError, match=f"'{variant}' does not run in a Trainer: choose from baseline, foreach, fused"
    ):
        recipe().points(FusionSettings(variants=["fused", variant]))


def test_trainer_gives_the_same_bits_under_each_strategy() -> None:
    batches = build_batches(DATA, 4, 5)
    done = {name: train(trainer_run(name), model(), batches, ADAMW) for name in ("fused", "retime_backward")}
    forward = train(trainer_run("retime_forward"), model(), batches, ADAMW)
    assert {run.weights for run in (*done.values(), forward)} == {done["fused"].weights}
    assert done["retime_backward"].losses == done["fused"].losses
    assert done["retime_backward"].strategy != done["fused"].strategy
    assert len(done["fused"].step_ms) == len(batches) - 1
    assert digest(model()) != done["fused"].weights


def test_trainer_draws_the_same_dropout_for_each_strategy() -> None:
    batches = build_batches(DATA, 4, 4)
    runs = [trainer_run(name) for name in ("fused", "retime_backward", "retime_forward")]
    dropping = nn.Sequential(model(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    done = [train(run, copy.deepcopy(dropping), batches, ADAMW) for run in runs]
    assert len({run.weights for run in done}) == 1


def test_trainer_counts_gradients_apart_for_the_first_step() -> None:
    batches = build_batches(DATA, 4, 3)
    counted = train(trainer_run("fused"), model(), batches, ADAMW, count_gradients=True)
    assert counted.first_peak_gradient_bytes == counted.peak_gradient_bytes == LAYERS * LAYER_BYTES
    assert largest_layer_bytes(model()) == LAYER_BYTES
