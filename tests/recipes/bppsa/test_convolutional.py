"""The recipes on BPPSA's convolutional networks, at small sizes, from the command line to the report."""

import shlex
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from rich.console import Console
from torch import nn

from retime.mechanisms.scan import CsrPattern, transposed_jacobian
from retime.recipes.bppsa import convolutional_jacobians as matrices
from retime.recipes.bppsa.convolutional import (
    DENSE,
    MOVED,
    PLAIN,
    SCAN,
    SPARSE,
    Convergence,
    PrunedFlops,
    differences,
    first_difference,
    jacobians,
    operator_flop,
    scan_name,
    scans,
    variants,
)
from retime.recipes.bppsa.settings import ConvolutionalSettings
from retime.recipes.bppsa.training import ACCURACY, FRESH, STALE, Staleness, batches, train
from retime.recipes.core.build import build
from retime.recipes.core.results import Result, load
from retime.recipes.data import digits
from retime.recipes.models import lenet5
from support.recipes import assert_draws, settings_for

Command = Callable[..., Path]


def test_table_1(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    result = load(run("experiment=bppsa_table1", "rounds=2", "warmup_rounds=0", "columns=3"))
    convolution, relu, pool = result.points
    assert [point.at["operator"] for point in result.points] == ["convolution", "relu", "max_pool"]
    assert convolution.facts["sparsity"] == 1 - 192 * 94**2 / (3072 * 65536)
    assert (convolution.facts["entries"], relu.facts["entries"], pool.facts["entries"]) == (1_696_512, 65_536, 65_536)
    assert convolution.facts["full matrix MiB"] == 768
    for point in result.points:
        assert point.variants("step") == [matrices.VALUES, matrices.ALL, matrices.AUTOGRAD, matrices.NUMERICAL]
        assert point.facts["largest difference from autograd's columns"] == 0
    shown = capsys.readouterr().out
    assert "sparsity 0.991573, the paper's 0.99157" in shown
    assert "1200000 x" in shown


def test_both_baselines_give_the_jacobian() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 3), torch.randn(1, 4)
    torch.testing.assert_close(matrices.autograd_columns(layer, inputs, 3), layer.weight.detach().t())
    torch.testing.assert_close(
        matrices.numerical_columns(layer, inputs, 4), layer.weight.detach(), rtol=0, atol=1e-6 / matrices.DIFFERENCE
    )


def test_figure_6(run: Command) -> None:
    small = ("model.width=0.3", "batch_size=8", "steps=4", "evaluate_every=2", "levels=[1,null]")
    path = run("experiment=bppsa_fig6", *small)
    result = load(path)
    assert " nats over 4 steps |" in path.with_suffix(".md").read_text(), "a curve has no quartiles"
    assert all(line.endswith(",1") for line in path.with_suffix(".csv").read_text().splitlines()[1:])
    assert [point.at["precision"] for point in result.points] == ["float64", "float32"]
    for point, close in zip(result.points, (1e-13, 1e-4), strict=True):
        assert scans(point) == ["scan, 1 levels", "scan, all levels"] == [scan_name(1), scan_name(None)]
        for name in (PLAIN, MOVED, *scans(point)):
            assert len(point.values(name, "training loss")) == 4
            assert len(point.values(name, "test loss")) == 3
        for name in scans(point):
            assert max(differences(point, name, "training loss")) < close
            assert 0 < point.facts["relative difference of the first gradient, float64"][name] < 1e-14
            assert "12 layers in 1 scans" in point.facts[f"{name} reports"]
        assert len(set(point.values(PLAIN, "training loss"))) == 4, "it trains"


def test_figure_6_prints_how_to_train_on_cifar10(tmp_path: Path) -> None:
    note = Convergence().notes(Result("bppsa_fig6", "", "bppsa", "Figure 6", ""))[-1]
    options = note.partition("from a folder: ")[2].removesuffix(".").replace("...", str(tmp_path))
    settings = settings_for("experiment=bppsa_fig6", *shlex.split(options))
    assert settings.model["in_channels"] == 3
    with pytest.raises(InstantiationException, match=r"FileNotFoundError\(.cifar10"):
        build(settings.data)


def test_moved_weights_are_moved_by_rounding_only() -> None:
    torch.manual_seed(0)
    found = variants(lenet5(width=0.3).double(), [1])
    moved, plain = (torch.cat([each.flatten() for each in found[name].parameters()]) for name in (MOVED, PLAIN))
    assert not torch.equal(moved, plain)
    assert bool(((moved - plain).abs() <= 4.5e-16 * plain.abs()).all())


def test_figure_6_would_show_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from retime.mechanisms.scan.jacobians.layers import ReLUJacobian

    torch.manual_seed(0)
    batch = torch.randn(4, 1, 32, 32), torch.arange(4)
    assert first_difference(lenet5(width=0.3), batch, 1) < 1e-14
    monkeypatch.setattr(ReLUJacobian, "values", lambda self, inputs: inputs.new_ones(self.pattern.entries, 1))
    assert first_difference(lenet5(width=0.3), batch, 1) > 0.1


@pytest.mark.long
def test_figure_10(run: Command, tmp_path: Path) -> None:
    small = ("model.width=0.125", "batch_size=4", "steps=1", "retrain_steps=1")
    more = "+cases.guaranteed={pruning: class_uniform, zeros: guaranteed, levels: 1}"
    result = load(run("experiment=bppsa_fig10", *small, more))
    assert [point.at["case"] for point in result.points] == ["class-blind", "class-uniform", "guaranteed"]
    for point in result.points:
        steps = point.facts["scan: kind, FLOP, m*n*k, critical"]
        assert point.facts["layers in the chain"] == 20
        assert point.facts["weights pruned away %"] == pytest.approx(97, abs=0.05)
        assert point.values(SCAN, "FLOP in all")[0] == sum(flop for _, flop, _, _ in steps)
        assert point.values(SCAN, "worst step")[0] <= point.values(SCAN, "longest path")[0]
        assert point.values(SPARSE, "FLOP in all")[0] < point.values(DENSE, "FLOP in all")[0]
    uniform, guaranteed = result.points[1:]
    assert guaranteed.values(SPARSE, "FLOP in all")[0] > uniform.values(SPARSE, "FLOP in all")[0]
    (report,) = tmp_path.rglob("result.md")
    assert report.read_text().count("Caveat: the green circles, the paper's baseline, are operators of the") == 3


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operators=\['softmax'\]: choose from convolution, relu, max_pool"):
        matrices.Generation().points(ConvolutionalSettings(operators=["softmax"]))
    with pytest.raises(ValueError, match=r"levels=\[\] leaves nothing to compare with"):
        Convergence().points(ConvolutionalSettings(precisions=["float32"]))
    with pytest.raises(ValueError, match=r"precisions=\['half'\]: choose from float32, float64"):
        Convergence().points(ConvolutionalSettings(precisions=["half"]))
    with pytest.raises(ValueError, match=r"cases\.mine=.*pruning is one of class_blind, class_uniform"):
        PrunedFlops().points(ConvolutionalSettings(cases={"mine": {"pruning": "random", "zeros": "guaranteed"}}))


def test_operators_of_back_propagation_are_counted_as_published() -> None:
    """By hand: a convolution 2 a non-zero, a ReLU of d inputs d + positive ones, a pooling inputs + outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    image = torch.randn(1, 1, 4, 4)
    found = jacobians(model, image, "of one image")
    assert len(found) == 3
    positive = int((model[0](image) > 0).sum())
    assert [operator_flop(*each) for each in found] == [(2 * 10**2, 256), (16 + positive, 256), (16 + 4, 64)]


def test_worst_operator_of_unpruned_vgg_11_by_formula() -> None:
    """6.3e7 = 2 * 256 * 256 * 22^2: of 24 rows of taps over an 8 x 8 image 22 lie inside; here with fewer channels."""
    (found,) = jacobians(nn.Sequential(nn.Conv2d(6, 5, 3, padding=1)), torch.randn(1, 6, 8, 8), "guaranteed")
    assert operator_flop(*found)[0] == 2 * 6 * 5 * 22**2


def test_figure_12(run: Command, tmp_path: Path) -> None:
    result = load(run("experiment=bppsa_fig12", "rounds=2", "steps=4", "evaluate_every=2", "decay_every=3"))
    (point,) = result.points
    layers = [3] * 4 + [2] * 4 + [1] * 3 + [0] * 3  # of 14, those of the first GPU have three updates behind them
    assert point.facts["delays of the weights"] == [delay for delay in layers for _ in ("weight", "bias")]
    assert [len(point.values(name, ACCURACY)) for name in (FRESH, STALE)] == [2, 2]
    (report,) = tmp_path.rglob("result.md")
    assert "accuracy that PipeDream's staleness costs with Adam, top-1 | 2.60 %" in report.read_text()


@pytest.mark.parametrize(("steps", "every"), [(4, 0), (4, 5), (5, 2), (0, 1)])
def test_accuracies_are_of_the_last_step_too(steps: int, every: int) -> None:
    settings = settings_for("experiment=bppsa_fig12", f"steps={steps}", f"evaluate_every={every}")
    with pytest.raises(ValueError, match=f"steps={steps} has to be a positive multiple of evaluate_every={every}"):
        Staleness().measure(settings, {}, print)


def test_gradients_are_of_old_weights() -> None:
    """By hand: a weight's gradient two updates late, its bias's at once, both added to what is newest."""
    data, sgd = {"_target_": "retime.recipes.data.digits"}, {"_target_": "torch.optim.SGD", "lr": 0.1}
    settings = ConvolutionalSettings(data=data, optimizer=sgd, batch_size=4, decay_every=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    versions = [[each.detach().clone().requires_grad_() for each in model.parameters()]]
    for number, (inputs, targets) in enumerate(islice(batches(digits(), 4, 0, torch.device("cpu")), 5)):
        old = [versions[max(0, number - 2)][0], versions[number][1]]
        loss = nn.functional.cross_entropy(nn.functional.linear(inputs.flatten(1), *old), targets)
        updates = zip(versions[number], torch.autograd.grad(loss, old), strict=True)
        rate = 0.1 if number < 3 else 0.01
        versions.append([(value - rate * each).detach().requires_grad_() for value, each in updates])
    assert len(list(train(model, settings, 5, [2, 0]))) == 5
    for ours, wanted in zip(model.parameters(), versions[-1], strict=True):
        torch.testing.assert_close(ours, wanted)


def figure_5(folder: Path, *overrides: str) -> Result:
    settings = settings_for("experiment=bppsa_fig5", "image_size=4", *overrides)
    return matrices.Patterns().run(settings, folder, Console(quiet=True))


def test_stored_places_are_those_that_can_be_non_zero(tmp_path: Path) -> None:
    result = figure_5(tmp_path)
    assert [point.facts[matrices.OTHERS] for point in result.points] == [0, 0, 0]
    names = (matrices.STORED, matrices.NON_ZERO)
    stored, seen = ([point.values(name, matrices.PLACES)[0] for point in result.points] for name in names)
    assert stored == [3 * 2 * 10**2, 32, 32]
    assert (seen[0], seen[1] <= 8) == (stored[0], True)  # of a pooling one input a window
    assert_draws(matrices.Patterns(), result, tmp_path)
    said = " ".join(matrices.Patterns().notes(result))
    assert "convolution: 48 x 32, 60.9 % guaranteed zeros; 0 places differ over 65 inputs" in said


def test_a_place_too_many_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(layer: Any, inputs: torch.Tensor) -> Any:
        outputs, found = transposed_jacobian(layer, inputs)
        return outputs, SimpleNamespace(pattern=CsrPattern.full(found.pattern.rows, found.pattern.columns))

    monkeypatch.setattr(matrices, "transposed_jacobian", full)
    (point,) = figure_5(tmp_path, "operators=[relu]", "rounds=8").points
    assert point.facts[matrices.OTHERS] == 32 * 32 - 32
