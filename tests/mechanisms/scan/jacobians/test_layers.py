"""Transposed Jacobians against autograd's, patterns from shapes; sparse products, the scan over them and its costs."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.scan import (
    CsrPattern,
    JacobianScan,
    ProductPlan,
    UnknownJacobian,
    VectorPlan,
    count_flops,
    flop_of_product,
    flop_of_vector,
    jacobian_of,
    product_pattern,
    prune_class_blind,
    scan_plan,
    transposed_jacobian,
)
from retime.mechanisms.scan.jacobians import sparse as product_module
from retime.mechanisms.scan.jacobians.sparse import dense_values


def by_autograd(layer: nn.Module, sample: Tensor) -> Tensor:
    """The transposed Jacobian of one sample, one output a column, as autograd gives it."""
    inputs = sample[None].clone().requires_grad_()
    outputs = layer(inputs)
    columns = []
    for number in range(outputs.numel()):
        picked = torch.zeros(outputs.numel(), dtype=outputs.dtype)
        picked[number] = 1
        (column,) = torch.autograd.grad(outputs, inputs, picked.view_as(outputs), retain_graph=True)
        columns.append(column.flatten())
    return torch.stack(columns, dim=1)


def check(layer: nn.Module, *shape: int, exact: bool = True) -> None:
    torch.manual_seed(0)
    layer = layer.double()
    inputs = torch.randn(2, *shape, dtype=torch.double)
    outputs, jacobian = transposed_jacobian(layer, inputs)
    assert torch.equal(outputs, layer(inputs))
    dense = dense_values(jacobian.pattern, jacobian.values).permute(2, 0, 1).expand(2, -1, -1)
    for index in range(2):
        wanted = by_autograd(layer, inputs[index])
        if exact:
            assert torch.equal(dense[index], wanted)
        else:
            torch.testing.assert_close(dense[index], wanted, rtol=1e-14, atol=1e-15)
    # every entry is a possible non-zero: somewhere it is one
    if not isinstance(layer, nn.ReLU | nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d | nn.Hardtanh):
        assert jacobian.pattern.entries == int((dense != 0).any(0).sum())


@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation", "groups"),
    list(itertools.product((1, 2, 3), (1, 2), (0, 1), (1, 2), (1, 2))),
)
def test_convolutions(size: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    check(nn.Conv2d(2, 4, size, stride, padding, dilation, groups), 2, 6, 5)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "ceil"), list(itertools.product((2, 3), (1, 2, 3), (0, 1), (False, True)))
)
def test_poolings(size: int, stride: int, padding: int, ceil: bool) -> None:
    check(nn.MaxPool2d(size, stride, padding, ceil_mode=ceil), 2, 7, 6)
    for counted in (True, False):
        check(nn.AvgPool2d(size, stride, padding, ceil, counted), 2, 7, 6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 4, (3, 2), (1, 2), (1, 0), (2, 1), 4), (4, 7, 6)),
        (nn.Conv2d(2, 3, 3, padding="same", dilation=2, bias=False), (2, 6, 5)),
        (nn.Conv2d(2, 3, 3, padding="valid"), (2, 4, 5)),
        (nn.Conv1d(2, 3, 4, padding="same", dilation=2), (2, 7)),
        (nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
        (nn.MaxPool2d(2, 1, dilation=2), (2, 7, 6)),
        (nn.MaxPool1d(2), (2, 7)),
        (nn.MaxPool3d(2), (2, 4, 5, 4)),
        (nn.AvgPool2d(2, divisor_override=3), (2, 7, 6)),
        (nn.AvgPool1d(3), (2, 7)),
        (nn.AvgPool3d(2), (2, 4, 5, 4)),
        (nn.AdaptiveAvgPool1d(2), (2, 3)),
        (nn.AdaptiveAvgPool2d((3, None)), (2, 7, 6)),
        (nn.AdaptiveAvgPool3d(2), (1, 3, 5, 4)),
        (nn.Linear(5, 4), (5,)),
        (nn.Flatten(), (2, 3, 2)),
        (nn.Unflatten(1, (2, 3)), (6,)),
        (nn.ReLU(), (2, 3, 3)),
    ],
)
def test_other_layers(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(layer, *shape)


@pytest.mark.parametrize("kind", [nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh])
def test_elementwise(kind: type[nn.Module]) -> None:
    check(kind(), 2, 3, exact=False)


def test_the_first_convolution_of_vgg_11_has_the_papers_sparsity() -> None:
    """Table 1: 0.99157; three by three places of 192 filters, 94 of 96 of which lie inside in each direction."""
    first = jacobian_of(nn.Conv2d(3, 64, 3, padding=1), torch.Size((3, 32, 32))).pattern
    assert (first.rows, first.columns) == (3072, 65536)
    assert first.entries == 192 * 94**2
    assert first.sparsity == 1 - 192 * 94**2 / (3072 * 65536)
    assert round(first.sparsity, 5) == 0.99157
    assert round(jacobian_of(nn.ReLU(), torch.Size((64, 32, 32))).pattern.sparsity, 5) == 0.99998
    assert round(jacobian_of(nn.MaxPool2d(2), torch.Size((64, 32, 32))).pattern.sparsity, 5) == 0.99994


def test_patterns_follow_from_shapes_alone_and_are_sorted() -> None:
    torch.manual_seed(0)
    shape = torch.Size((2, 6, 5))
    for make in (lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: nn.MaxPool2d(3, 2), nn.ReLU):
        one, other = (jacobian_of(make(), shape).pattern for _ in range(2))
        assert torch.equal(one.indptr, other.indptr)
        assert torch.equal(one.indices, other.indices)
        place = one.row_of * one.columns + one.indices
        assert bool((place.diff() > 0).all())
        assert torch.equal(one.row_counts.cumsum(0), one.indptr[1:])
        assert int(one.column_counts.sum()) == one.entries


def test_pruned_weights_are_no_entries() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(120, 7)).double()
    before = jacobian_of(model[0], torch.Size((2, 6, 5)))
    kept = prune_class_blind(model, 0.7)
    weights = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()])
    assert int((weights == 0).sum()) == round(0.7 * weights.numel())
    assert weights[weights != 0].abs().min() >= weights.abs().quantile(0.7)
    assert kept["0"] > kept["2"], "one threshold for both: the layer with larger weights keeps more"
    check(model[0], 2, 6, 5)
    check(model[2], 120)
    assert not before.still_fits(model[0])
    assert jacobian_of(model[0], torch.Size((2, 6, 5))).still_fits(model[0])


def test_zeros_of_one_sample_can_be_left_out() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 4, 4)
    _, relu = transposed_jacobian(nn.ReLU(), inputs)
    assert relu.without_zeros(1).entries == int((inputs[1] > 0).sum())
    _, pool = transposed_jacobian(nn.MaxPool2d(2), inputs)
    assert pool.without_zeros().entries == 3 * 2 * 2
    assert torch.equal(pool.without_zeros().column_counts, torch.ones(12, dtype=torch.long))


class OwnLinear(nn.Linear):
    """Might compute anything."""


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (nn.BatchNorm2d(3), (3, 4, 4), "BatchNorm2d has no analytic Jacobian"),
        (OwnLinear(3, 2), (3,), "OwnLinear has no analytic Jacobian"),
        (nn.Conv2d(3, 2, 3), (2, 4, 4), r"Conv2d: input \(2, 4, 4\) a sample, but it takes \(3,"),
        (nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), (3, 4, 4), "padding_mode='reflect': only 'zeros'"),
        (nn.Linear(3, 2), (5, 3), r"input \(5, 3\) a sample, but it takes \(3,\)"),
        (nn.MaxPool2d(2), (4, 4), r"input \(4, 4\) a sample"),
        (nn.MaxPool2d(2, return_indices=True), (1, 4, 4), "return_indices=True: it has two outputs"),
        (nn.Flatten(0), (3,), "from dimension 0, and 0 is the batch; use 1 or more"),
        (nn.LeakyReLU(inplace=True), (3,), "it works in place; set inplace=False"),
    ],
)
def test_what_is_unknown_says_why(layer: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(UnknownJacobian, match=reason):
        jacobian_of(layer, torch.Size(shape))


def sparse(rows: int, columns: int, density: float, samples: int = 1) -> tuple[CsrPattern, Tensor]:
    kept = torch.rand(rows * columns) < density
    pattern = CsrPattern.full(rows, columns).only(kept)
    return pattern, torch.randn(pattern.entries, samples, dtype=torch.double)


def dense(pattern: CsrPattern, values: Tensor) -> Tensor:
    return dense_values(pattern, values).permute(2, 0, 1)


def same(one: CsrPattern, other: CsrPattern) -> bool:
    """Whether both store exactly the same places of matrices of the same shape."""
    tensors = (one.indptr, other.indptr), (one.indices, other.indices)
    return one.columns == other.columns and all(torch.equal(*pair) for pair in tensors)


@pytest.mark.parametrize("samples", [(1, 1), (3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("density", [(0.1, 0.1), (0.3, 1.0), (1.0, 0.3), (1.0, 1.0), (0.0, 0.5), (0.5, 0.05)])
def test_products(density: tuple[float, float], samples: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(product_module, "LISTED_AT_A_TIME", 50)  # several chunks even here
    a, left = sparse(13, 17, density[0], samples[0])
    b, right = sparse(17, 11, density[1], samples[1])
    plan = ProductPlan(a, b)
    wanted = dense(a, left) @ dense(b, right)
    product = dense(plan.pattern, plan(left, right))
    torch.testing.assert_close(product.expand_as(wanted), wanted, rtol=1e-13, atol=1e-14)
    assert same(plan.pattern, product_pattern(a, b))
    ones = (dense(a, left) != 0).double()[0] @ (dense(b, right) != 0).double()[0]
    assert plan.pattern.entries == int((ones > 0).sum())
    assert flop_of_product(a, b) == 2 * int(ones.sum())
    assert torch.equal(plan(left, right), plan(left, right))


def test_both_numeric_phases_are_used_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, left = sparse(20, 20, 0.5, 2)
    b, right = sparse(20, 20, 0.5, 2)
    by_gemm = ProductPlan(a, b)
    monkeypatch.setattr(product_module, "DENSE_GAIN", 0)
    by_entry = ProductPlan(a, b)
    assert by_gemm.is_dense
    assert not by_entry.is_dense
    assert same(by_gemm.pattern, by_entry.pattern)
    torch.testing.assert_close(by_gemm(left, right), by_entry(left, right), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("samples", [1, 4])
def test_matrix_times_vector(density: float, samples: int) -> None:
    torch.manual_seed(0)
    pattern, values = sparse(9, 7, density, samples)
    vectors = torch.randn(7, 4, dtype=torch.double)
    wanted = (dense(pattern, values) @ vectors.t()[:, :, None])[:, :, 0].t()
    torch.testing.assert_close(VectorPlan(pattern)(values, vectors), wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("levels", [0, 1, 2, 3, None])
@pytest.mark.parametrize("matrices", [0, 1, 2, 3, 4, 7, 8, 9, 21])
def test_scan_gives_every_gradient(matrices: int, levels: int | None) -> None:
    torch.manual_seed(matrices)
    sizes = torch.randint(1, 6, (matrices + 1,)).tolist()
    chain = [sparse(sizes[k + 1], sizes[k], 0.7, 1 + k % 2) for k in range(matrices)]
    gradient = torch.randn(sizes[0], 2, dtype=torch.double)
    ours = JacobianScan([pattern for pattern, _ in chain], levels)(gradient, [values for _, values in chain])
    assert len(ours) == matrices + 1
    for index, (pattern, values) in enumerate([(None, None), *chain]):
        if pattern is not None and values is not None:
            gradient = (dense(pattern, values) @ gradient.t()[:, :, None])[:, :, 0].t()
        torch.testing.assert_close(ours[index], gradient, rtol=1e-12, atol=1e-13)


def test_the_whole_scan_over_seven_jacobians() -> None:
    """Algorithm 1 as in the paper's Figure 1, M_1 .. M_7 numbered 1 .. 7; what line 9 overwrites is left out."""
    plan = scan_plan(7)
    assert str(plan).splitlines() == [
        "up 0: 8=1*0 9=3*2 10=5*4 11=7*6",
        "up 1: 12=9*8 13=11*10",
        "up 2: 14=13*12",
        "down 4: 15=10*12",
        "down 5: 16=2*8 17=4*12 18=6*15",
    ]
    assert plan.gradients == (0, 8, 16, 12, 17, 15, 18, 14)


def test_without_levels_it_is_back_propagation() -> None:
    plan = scan_plan(3, 0)
    assert str(plan) == "linear 0: 4=1*0\nlinear 1: 5=2*4\nlinear 2: 6=3*5"
    assert all(step.is_vector for step in plan.steps)


@pytest.mark.parametrize("matrices", [1, 7, 8, 20, 100, 1000])
def test_depth_is_logarithmic_and_work_linear(matrices: int) -> None:
    plan = scan_plan(matrices)
    assert len({(step.phase, step.level) for step in plan.steps}) <= 2 * matrices.bit_length()
    assert len(plan.steps) <= 2 * matrices
    assert not [step for step in plan.steps if step.phase == "down" and not step.is_vector], "section 3.2"


def test_flops_by_hand() -> None:
    """A = [[a, b], [0, c]] and B = [[d, 0], [e, f]]: a d + b e, b f, c e, c f are five products."""
    a = CsrPattern(2, 2, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))
    b = CsrPattern(2, 2, torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]))
    assert flop_of_product(a, b) == 2 * (1 * 1 + 2 * 2)
    assert flop_of_vector(a) == 6
    assert product_pattern(a, b).is_full


def test_flops_of_each_step_and_the_longest_path() -> None:
    """g (2), M_1 4 x 2 full, M_2 the diagonal of 4, M_3 3 x 4 full: scan with one level, by hand."""
    chain = [CsrPattern.full(4, 2), CsrPattern.diagonal(4), CsrPattern.full(3, 4)]
    plan = scan_plan(3, 1)
    assert str(plan) == "up 0: 4=1*0 5=3*2\nlinear 1: 6=5*4\ndown 2: 7=2*4"
    steps = count_flops(plan, chain)
    assert [(each.kind, each.flop, each.dense_size) for each in steps] == [
        ("mv", 2 * 8, 8),
        ("mm", 2 * 12, 3 * 4 * 4),
        ("mv", 2 * 12, 12),
        ("mv", 2 * 4, 16),
    ]
    assert [each.critical for each in steps] == [False, True, True, False]
    with pytest.raises(ValueError, match="for 3 Jacobians, not for 2"):
        count_flops(plan, chain[:2])
