"""The recipes on BPPSA's convolutional networks, at small sizes, from the command line to the report."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

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
from retime.recipes.bppsa.convolutional_jacobians import (
    ALL,
    AUTOGRAD,
    DIFFERENCE,
    NUMERICAL,
    VALUES,
    Generation,
    autograd_columns,
    numerical_columns,
)
from retime.recipes.bppsa.settings import ConvolutionalSettings
from retime.recipes.core.results import Result, load
from retime.recipes.models import lenet5

Command = Callable[..., Path]


def test_table_1(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    result = load(run("experiment=bppsa_table1", "rounds=2", "warmup_rounds=0", "columns=3"))
    convolution, relu, pool = result.points
    assert [point.at["operator"] for point in result.points] == ["convolution", "relu", "max_pool"]
    assert convolution.facts["sparsity"] == 1 - 192 * 94**2 / (3072 * 65536)
    assert (convolution.facts["entries"], relu.facts["entries"], pool.facts["entries"]) == (1_696_512, 65_536, 65_536)
    assert convolution.facts["full matrix MiB"] == 768
    for point in result.points:
        assert point.variants("step") == [VALUES, ALL, AUTOGRAD, NUMERICAL]
        assert point.facts["largest difference from autograd's columns"] == 0
    shown = capsys.readouterr().out
    assert "sparsity 0.991573, the paper's 0.99157" in shown
    assert "1200000 x" in shown


def test_table_1_refuses_an_unknown_operator() -> None:
    with pytest.raises(ValueError, match=r"operators=\['softmax'\]: choose from convolution, relu, max_pool"):
        Generation().points(ConvolutionalSettings(operators=["softmax"]))


def test_both_baselines_give_the_jacobian() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 3), torch.randn(1, 4)
    torch.testing.assert_close(autograd_columns(layer, inputs, 3), layer.weight.detach().t())
    torch.testing.assert_close(
        numerical_columns(layer, inputs, 4), layer.weight.detach(), rtol=0, atol=1e-6 / DIFFERENCE
    )


def test_figure_6(run: Command) -> None:
    small = ("model.width=0.3", "batch_size=8", "steps=4", "evaluate_every=2", "levels=[1,null]")
    result = load(run("experiment=bppsa_fig6", *small))
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


def test_moved_weights_are_moved_by_rounding_only() -> None:
    torch.manual_seed(0)
    found = variants(lenet5(width=0.3).double(), [1])
    moved, plain = (torch.cat([each.flatten() for each in found[name].parameters()]) for name in (MOVED, PLAIN))
    assert not torch.equal(moved, plain)
    assert bool(((moved - plain).abs() <= 4.5e-16 * plain.abs()).all())


def test_figure_6_refuses_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"levels=\[\] leaves nothing to compare with"):
        Convergence().points(ConvolutionalSettings(precisions=["float32"]))
    with pytest.raises(ValueError, match=r"precisions=\['half'\]: choose from float32, float64"):
        Convergence().points(ConvolutionalSettings(precisions=["half"]))


def test_figure_6_would_show_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from retime.mechanisms.scan.jacobians.layers import ReLUJacobian

    torch.manual_seed(0)
    batch = torch.randn(4, 1, 32, 32), torch.arange(4)
    assert first_difference(lenet5(width=0.3), batch, 1) < 1e-14
    monkeypatch.setattr(ReLUJacobian, "values", lambda self, inputs: inputs.new_ones(self.pattern.entries, 1))
    assert first_difference(lenet5(width=0.3), batch, 1) > 0.1


def figure_10(run: Command) -> Result:
    small = ("model.width=0.125", "batch_size=4", "steps=1", "retrain_steps=1")
    more = "cases.guaranteed={pruning: class_uniform, zeros: guaranteed, levels: 1}"
    return load(run("experiment=bppsa_fig10", *small, f"+{more}"))


def test_figure_10(run: Command, tmp_path: Path) -> None:
    result = figure_10(run)
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
    assert (
        report.read_text().count("Caveat: the green circles, the paper's baseline, are operators of the network") == 3
    )


def test_figure_10_refuses_an_unknown_case() -> None:
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
