"""`ScanSequential` against `nn.Sequential`: same outputs, same gradients, clear about what it cannot do."""

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.scan import prune_class_blind
from retime.modules.scan_sequential import ScanSequential
from retime.recipes.models import lenet5, vgg

LEVELS = [0, 1, 2, None]


def small(*, dropout: float = 0.0, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=inplace), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 9), nn.Sigmoid(), nn.Dropout(dropout), nn.Linear(9, 3)),
    ).double()


def gradients(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the gradients of the input (if it requires one) and of all parameters."""
    torch.manual_seed(3)
    outputs = model(inputs)
    wanted = [each for each in (inputs, *model.parameters()) if each.requires_grad]
    return outputs, list(torch.autograd.grad((outputs * outputs.detach().cos()).sum(), wanted))


def check(plain: nn.Sequential, inputs: Tensor, levels: int | None, tolerance: float = 1e-12) -> ScanSequential:
    ours = ScanSequential.of(plain, levels)
    wanted_outputs, wanted = gradients(plain, inputs)
    outputs, scanned = gradients(ours, inputs)
    assert torch.equal(outputs, wanted_outputs)
    for one, other in zip(scanned, wanted, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
    return ours


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("input_gradient", [True, False])
def test_same_gradients(levels: int | None, input_gradient: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 2, 16, 16, dtype=torch.double, requires_grad=input_gradient)
    ours = check(small(dropout=0.5), inputs, levels)
    report = ours.report()
    assert len(report.scanned) == 11
    assert not report.plain
    assert report.scans == 1
    assert "11 layers in 1 scans" in str(report)


@pytest.mark.parametrize("classic", [True, False])
def test_lenet_5(classic: bool) -> None:
    torch.manual_seed(0)
    check(lenet5(classic=classic).double(), torch.randn(2, 1, 32, 32, dtype=torch.double), 1)


def test_vgg_11() -> None:
    torch.manual_seed(0)
    model = vgg(11, width=0.125, num_classes=10, hidden=0, image_size=32).double()
    ours = check(model, torch.randn(1, 3, 32, 32, dtype=torch.double), 1)
    assert not ours.report().plain


def test_pruned_and_pruned_further() -> None:
    torch.manual_seed(0)
    plain = small()
    inputs = torch.randn(2, 2, 16, 16, dtype=torch.double)
    prune_class_blind(plain, 0.6)
    ours = check(plain, inputs, 2)
    assert not ours.report().plain, "the hooks that apply masks are known"
    prune.l1_unstructured(plain[0], "weight", 0.5)
    for one, other in zip(gradients(ours, inputs)[1], gradients(plain, inputs)[1], strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_inplace_relu_frozen_layers_other_shapes_and_outputs_changed_in_place() -> None:
    torch.manual_seed(0)
    plain = small(inplace=True)
    plain[0].requires_grad_(False)
    ours = check(plain, torch.randn(2, 2, 16, 16, dtype=torch.double), 2)
    outputs = ours(torch.randn(5, 2, 17, 16, dtype=torch.double))
    outputs += 1
    outputs.sum().backward()
    assert ours[0].weight.grad is None
    assert ours[3].weight.grad is not None


def test_training_step_by_step() -> None:
    torch.manual_seed(0)
    plain = small()
    ours = ScanSequential.of(copy.deepcopy(plain))
    for model in (plain, ours):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 16, 16, dtype=torch.double)).square().sum().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_an_unknown_layer_runs_plain_between_two_scans_and_is_named_once() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten()]
    plain = nn.Sequential(*layers).double()
    inputs = torch.randn(2, 2, 8, 8, dtype=torch.double, requires_grad=True)
    ours = ScanSequential.of(copy.deepcopy(plain))
    with pytest.warns(NoEffectWarning, match="1 of 6 layers of ScanSequential run in plain autograd: 2: BatchNorm2d"):
        _, scanned = gradients(ours, inputs)
    for one, other in zip(scanned, gradients(plain, inputs)[1], strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()
    assert ours.report().scans == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(inputs)


def test_a_layer_that_is_there_twice_runs_twice() -> None:
    torch.manual_seed(0)
    activation, layer = nn.ReLU(), nn.Linear(4, 4)
    plain = nn.Sequential(layer, activation, layer, activation, nn.Linear(4, 2)).double()
    ours = check(plain, torch.randn(3, 4, dtype=torch.double), None)
    assert (len(ours), ours.state_dict().keys()) == (5, plain.state_dict().keys())


def test_hooks_keep_their_layer_plain() -> None:
    seen = []
    ours = ScanSequential.of(small())
    ours[7].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    with pytest.warns(NoEffectWarning, match="7: it has hooks"):
        ours(torch.randn(2, 2, 16, 16, dtype=torch.double)).sum().backward()
    assert seen == [(2, 9)]


def test_a_forward_that_was_replaced_on_the_instance_runs() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)).double()
    block, last = plain[1], plain[2]
    block.forward = lambda inputs: inputs + nn.Sequential.forward(block, inputs)
    last.forward = lambda inputs: nn.functional.linear(inputs, 3 * last.weight, last.bias)
    with pytest.warns(NoEffectWarning, match="1: its forward was replaced on the instance; 2: its forward"):
        check(plain, torch.randn(5, 4, dtype=torch.double), 2)
    plain.forward = plain.forward
    with pytest.raises(TypeError, match="Sequential has a forward of its own"):
        ScanSequential.of(plain)


def test_it_is_a_sequential() -> None:
    plain = small()
    ours = ScanSequential(OrderedDict(plain.named_children()), levels=1)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert len(ours[:3]) == 3
    assert isinstance(ours[:3], ScanSequential)
    nested = check(
        nn.Sequential(small()[:7], nn.Sequential(nn.Linear(16, 2))).double(), torch.ones(1, 2, 16, 16).double(), 2
    )
    assert nested.report().scanned[-1] == "1.0"
    again = pickle.loads(pickle.dumps(nested))
    assert torch.equal(again(torch.ones(1, 2, 16, 16).double()), nested(torch.ones(1, 2, 16, 16).double()))
    with torch.no_grad():
        assert not nested(torch.ones(1, 2, 16, 16).double()).requires_grad


def test_the_backward_pass_really_is_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One zeroed Jacobian must show: no gradient goes around the scan."""
    from retime.mechanisms.scan.jacobians.layers import ReLUJacobian

    monkeypatch.setattr(ReLUJacobian, "values", lambda self, inputs: inputs.new_zeros(self.pattern.entries, 1))
    ours = ScanSequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ours(torch.ones(1, 3)).sum().backward()
    assert not ours[0].weight.grad.any()
    assert ours[2].bias.grad.all()


def test_double_backward_and_a_weight_that_changed_after_the_forward_pass_are_refused() -> None:
    ours = ScanSequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no double backward: call backward without create_graph=True"):
        torch.autograd.grad(ours(inputs).sum(), inputs, create_graph=True)
    outputs = ours(torch.ones(1, 3))
    with torch.no_grad():
        ours[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_low_precision_stay_close(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = small().float()
    ours = ScanSequential.of(copy.deepcopy(plain))
    inputs = torch.randn(2, 2, 16, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        wanted, scanned = gradients(plain, inputs)[1], gradients(ours, inputs)[1]
    for one, other in zip(scanned, wanted, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).norm() <= (1e-5 if dtype is torch.float32 else 0.05) * other.norm()


def test_a_layer_that_takes_anothers_place_has_its_own_jacobian() -> None:
    chain, x = (
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Flatten(0), nn.Sigmoid()),
        torch.randn(2, 2, 5, 5),
    )
    scan = ScanSequential.of(chain)
    wide = nn.Conv2d(2, 2, 3, padding=2, dilation=2)
    pools: list[nn.Module] = [nn.MaxPool2d([3, 3], 1, [1, 1]), nn.MaxPool2d([1, 3], 1, [0, 1])]  # type: ignore
    for place, layer in ((0, chain[0]), (0, wide), (1, pools[0]), (1, pools[1])):
        chain[place] = scan[place] = layer
        gradients = []
        for net in (chain, scan):
            inputs = x.clone().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # of the last two, which run plain
                net(inputs).sum().backward()
            gradients.append(inputs.grad)
        assert torch.allclose(*gradients, atol=1e-6)


def test_a_forward_of_its_own_and_hooks_of_the_model_are_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    with pytest.raises(TypeError, match="Residual has a forward of its own"):
        ScanSequential.of(Residual(nn.Linear(2, 2)))
    model = small()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="register them on the result"):
        ScanSequential.of(model)


def test_few_patterns_are_kept_for_inputs_of_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retime.modules.scan_sequential.MOST_JACOBIANS", 4)
    net = ScanSequential(nn.Tanh(), nn.ReLU())
    for width in range(1, 9):
        x = torch.randn(2, width, requires_grad=True)
        net(x).sum().backward()
        assert torch.allclose(x.grad, (1 - x.tanh() ** 2) * (x > 0))  # type: ignore[arg-type]
    assert len(net._jacobians) <= 4
