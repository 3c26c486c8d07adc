"""BatchNorm under sub-batches: layers by name, ghost statistics, and exact statistics with operators in chunks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from retime.mechanisms.memory.batches.batchnorm import batch_statistics_layers, check_choice, ghost_momentum
from retime.mechanisms.memory.batches.batchnorm_exact import ChunkedOperators
from retime.mechanisms.memory.batches.certificate import Certificate
from retime.mechanisms.memory.batches.weights import Weighting
from retime.mechanisms.memory.separability.certify import certify
from retime.mechanisms.memory.step.sub_batches import SubBatches
from support.memory_steps import classifier, convolutional, images

SAMPLES = 7


class Residual(nn.Module):
    """Convolutions of all sorts with BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", groups=4, dilation=2)
        self.norm2 = nn.BatchNorm2d(8)
        self.reflect = nn.Conv2d(8, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1)
        self.norm3 = nn.BatchNorm2d(6)
        self.head = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + F.relu(self.norm2(self.grouped(x)), inplace=True)
        return self.head(F.relu(self.norm3(self.up(self.reflect(x)))).mean((2, 3)))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(4, 8, 3))
        self.volume = nn.Conv3d(1, 2, (3, 1, 2), padding="valid")
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x.flatten(2).transpose(1, 2)[:, :4] if x.dim() > 3 else x))
        folded = self.volume(hidden.unflatten(2, (2, -1)).permute(0, 2, 1, 3)[:, :1, None].expand(-1, -1, 3, -1, -1))
        return self.out(folded.flatten(1)[:, :6])


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    buffers = [value.clone().double() for value in model.buffers()]
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *buffers]


def distance(one: list[Tensor], two: list[Tensor]) -> float:
    """Of all numbers together, relative to their size."""
    flat = [torch.cat([value.double().flatten() for value in values]) for values in (one, two)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.parametrize("sub_batch", [1, 3, 6])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_chunks_give_the_same_numbers(sub_batch: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Residual().to(memory_format=memory_format)
    x, y = torch.randn(SAMPLES, 3, 12, 12).to(memory_format=memory_format), torch.arange(SAMPLES) % 5
    plain, doubled, chunked = copy.deepcopy(model), copy.deepcopy(model).double(), copy.deepcopy(model).double()
    truth = gradients(doubled, x.double(), y)

    ChunkedOperators(chunked, sub_batch)
    operators = ChunkedOperators(model, sub_batch)
    found = gradients(model, x, y)

    assert distance(truth, gradients(chunked, x.double(), y)) <= 1e-13
    assert distance(truth, found) <= 3 * distance(truth, gradients(plain, x, y)), "worse than rounding"
    report = operators.report()
    assert (report.layers, report.calls) == (6, 6)
    assert report.chunks == 6 * -(-SAMPLES // sub_batch)
    assert report.whole == {}
    operators.remove()
    assert all("forward" not in vars(module) for module in model.modules())
    model(x)
    assert operators.report().calls == 6


def test_other_dimensions_and_parametrized_weights() -> None:
    torch.manual_seed(0)
    model = Sequences()
    x, y = torch.randn(SAMPLES, 4, 10), torch.arange(SAMPLES) % 5
    expected = gradients(copy.deepcopy(model), x, y)

    operators = ChunkedOperators(model, 2)

    assert distance(expected, gradients(model, x, y)) <= 1e-6
    assert operators.report().calls == 3


def test_ten_steps_with_batch_norm_and_chunks() -> None:
    torch.manual_seed(0)
    ends = []
    start = Residual()
    for sub_batch in (None, 2):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        operators = ChunkedOperators(model, sub_batch) if sub_batch else None
        for number in range(10):
            x = torch.randn(SAMPLES, 3, 12, 12, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(SAMPLES) % 5).backward()
            optimizer.step()
        assert operators is None or operators.report().calls == 60
        ends.append(torch.cat([value.double().flatten() for value in model.state_dict().values()]))

    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) <= 1e-5


class LargestInput(TorchDispatchMode):
    """The most samples that a convolution or its backward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::convolution", "aten::convolution_backward"):
            self.most = max(self.most, len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("sub_batch", "most"), [(None, SAMPLES), (3, 3)])
def test_no_kernel_is_given_more_than_a_chunk(sub_batch: int | None, most: int) -> None:
    model = Residual()
    if sub_batch:
        ChunkedOperators(model, sub_batch)

    with LargestInput() as seen:
        gradients(model, torch.randn(SAMPLES, 3, 12, 12), torch.arange(SAMPLES) % 5)

    assert seen.most == most


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    model.stem.weight.requires_grad_(False)
    model.grouped.bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    x, y = torch.randn(SAMPLES, 3, 12, 12, dtype=torch.double), torch.arange(SAMPLES) % 5
    ChunkedOperators(model, 2)

    for net in (plain, model):
        F.cross_entropy(net(x), y).backward()

    assert model.stem.weight.grad is None
    assert model.grouped.bias.grad is None
    pairs = [(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True) if p.requires_grad]
    assert distance([one for one, _ in pairs], [two for _, two in pairs]) <= 1e-12


def test_autocast_computes_chunks_in_its_type() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    plain = copy.deepcopy(model)
    x = torch.randn(SAMPLES, 3, 8, 8)
    ChunkedOperators(model, 2)

    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(x), model(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for output in (expected, found):
        output.float().square().mean().backward()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert two.grad.dtype == torch.float32
        assert float((one.grad - two.grad).norm()) <= 0.03 * float(one.grad.norm()) + 1e-3


def test_hooks_of_layers_see_the_whole_batch() -> None:
    model = convolutional(nn.BatchNorm2d)
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda _, inputs, output: seen.append((len(inputs[0]), len(output))))
    ChunkedOperators(model, 4)

    model(images()[0])

    assert seen == [(11, 11)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_what_cannot_be_chunked_runs_whole_and_is_counted() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Conv2d(3, 4, 2, padding="same"), nn.Conv2d(3, 4, 3), nn.Linear(4, 4)])
    plain = copy.deepcopy(layers)
    operators = ChunkedOperators(layers, 2)
    inputs = [torch.randn(SAMPLES, 3, 6, 6), torch.randn(3, 6, 6), torch.randn(4)]

    for layer, same, value in zip(layers, plain, inputs, strict=True):
        assert torch.equal(layer(value), same(value))
    layers[1](torch.randn(2, 3, 6, 6))

    assert operators.report().calls == 0
    assert operators.report().whole == {
        "padding='same' is uneven": 1,
        "its input has no batch dimension": 2,
        "the batch is no larger than a chunk": 1,
    }
    assert "2 calls whole because its input has no batch dimension" in str(operators.report())


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    with pytest.raises(ValueError, match="no convolution or linear layer"):
        ChunkedOperators(nn.Sequential(OwnForward(4, 4), nn.BatchNorm1d(4)), 2)
    with pytest.raises(ValueError, match="1 sample or more"):
        ChunkedOperators(convolutional(), 0)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model = convolutional(nn.BatchNorm2d)
    ChunkedOperators(model, 2)
    x = torch.randn(SAMPLES, 3, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_layers_that_need_the_whole_batch_are_named() -> None:
    model = Residual()

    assert batch_statistics_layers(model) == ["norm", "norm2", "norm3", "head.1"]
    model.norm2.eval()
    assert batch_statistics_layers(model) == ["norm", "norm3", "head.1"]
    assert batch_statistics_layers(model.eval()) == []
    assert batch_statistics_layers(nn.SyncBatchNorm(4)) == [""]
    assert batch_statistics_layers(nn.Sequential(nn.GroupNorm(1, 4), nn.InstanceNorm2d(4))) == []


def test_ghost_statistics_move_as_far_as_a_batchs() -> None:
    torch.manual_seed(0)
    plain, ghost = nn.BatchNorm1d(4, momentum=0.1), nn.BatchNorm1d(4, momentum=0.1)
    value = torch.randn(1, 4)
    plain(value.expand(12, 4))
    with ghost_momentum(ghost, 3):
        for _ in range(3):
            ghost(value.expand(4, 4))

    torch.testing.assert_close(ghost.running_mean, plain.running_mean)
    assert ghost.momentum == 0.1
    naive = nn.BatchNorm1d(4, momentum=0.1)
    for _ in range(3):
        naive(value.expand(4, 4))
    assert (naive.running_mean - plain.running_mean).abs().max() > 0.1 * plain.running_mean.abs().max()


@pytest.mark.parametrize("momentum", [None, 1.0, 0.0])
def test_ghost_momentum_at_its_ends(momentum: float | None) -> None:
    layer = nn.BatchNorm1d(4, momentum=momentum)

    with ghost_momentum(layer, 5):
        assert layer.momentum == momentum
    with pytest.raises(ValueError, match="parts=0"), ghost_momentum(layer, 0):
        pass


def test_ghost_sub_batches_train_with_their_own_statistics() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional(nn.BatchNorm2d))
    layer = case.model[1]
    certificate = certify(case.step, case.batch, case.model, ghost=True)
    assert certificate.separable

    parts = SubBatches(case.model, case.step, case.batch, 4, certificate, ghost=True)
    result = parts.run()

    by_hand = copy.deepcopy(case.model)
    losses = [F.cross_entropy(by_hand(part[0]), part[1]) * size / 11 for part, size in zip(parts.parts, (4, 4, 3))]  # noqa: B905
    torch.testing.assert_close(result, torch.stack(losses).sum().detach())
    assert layer.momentum == 0.1
    assert layer.num_batches_tracked == 3
    assert all(p.grad is not None for p in case.model.parameters())


def test_choices() -> None:
    assert check_choice("exact") == "exact"
    with pytest.raises(ValueError, match="batchnorm='whole': use 'offload', 'ghost' or 'exact'"):
        check_choice("whole")


def test_exact_is_for_models_that_sub_batches_would_change() -> None:
    """The same model in sub-batches with plain weights is far off; in chunks it is not."""
    torch.manual_seed(0)
    case = classifier(convolutional(nn.BatchNorm2d))
    x, y = case.batch
    expected = gradients(copy.deepcopy(case.model), x, y)
    naive = copy.deepcopy(case.model)

    SubBatches(naive, lambda b: F.cross_entropy(naive(b[0]), b[1]), (x, y), 4, Certificate(Weighting("mean"))).run()

    difference = sum(float((p.grad - g).norm()) for p, g in zip(naive.parameters(), expected[2:], strict=False))
    assert difference > 1e-2
    ChunkedOperators(case.model, 4)
    assert distance(expected, gradients(case.model, x, y)) <= 1e-6
