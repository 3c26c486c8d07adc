"""ScanRNN, ScanGRU and ScanLSTM against torch.nn's own modules: bits of the values, gradients, every form of input."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from retime.modules import ScanGRU, ScanLSTM, ScanRNN

T, B, X, H = 7, 3, 4, 5
TOLERANCE = 1e-12
CELLS = {
    "tanh": (nn.RNN, ScanRNN, {"nonlinearity": "tanh"}),
    "relu": (nn.RNN, ScanRNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, ScanGRU, {}),
    "lstm": (nn.LSTM, ScanLSTM, {}),
}
CELL = pytest.mark.parametrize("cell", list(CELLS))


def pair(cell, *sizes, dtype=torch.float64, solver="chunk", **options):
    """torch.nn's module and ours with the same weights; "auto" would take torch's own backward at such sizes."""
    plain_class, scan_class, more = CELLS[cell]
    torch.manual_seed(0)
    plain = plain_class(*(sizes or (X, H)), dtype=dtype, **more, **options)
    scan = scan_class(*(sizes or (X, H)), dtype=dtype, solver=solver, **more, **options)
    scan.load_state_dict(plain.state_dict())
    return plain, scan


def leaves(value):
    """The tensors of an output, in order."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in value for leaf in leaves(part)]


def run(module, data, hx, seed=1):
    """Outputs and the gradients of everything, for a loss in which every output number counts differently."""
    torch.manual_seed(seed)
    leaf = data.data if isinstance(data, PackedSequence) else data
    leaf = leaf.detach().clone().requires_grad_()
    data = data._replace(data=leaf) if isinstance(data, PackedSequence) else leaf
    states = [] if hx is None else [state.detach().clone().requires_grad_() for state in leaves(hx)]
    given = None if hx is None else tuple(states) if isinstance(hx, tuple) else states[0]
    outputs = leaves(module(data, given))
    loss = sum((out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    gradients = torch.autograd.grad(loss, [leaf, *states, *module.parameters()])
    return outputs, gradients


def assert_same(plain, scan, data, hx=None, tolerance=TOLERANCE, apart=0.0):
    expected, expected_gradients = run(plain, data, hx)
    outputs, gradients = run(scan, data, hx)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert (mine - theirs).abs().max() <= apart
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert (mine - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


def hidden(cell, layers, directions, batch=B, dtype=torch.float64):
    torch.manual_seed(2)
    states = [torch.randn(layers * directions, batch, H, dtype=dtype) for _ in range(2)]
    return tuple(states) if cell == "lstm" else states[0]


def packed(enforce_sorted, dtype=torch.float64):
    torch.manual_seed(3)
    lengths = [7, 4, 4, 1] if enforce_sorted else [4, 1, 7, 4]
    return pack_sequence([torch.randn(n, X, dtype=dtype) for n in lengths], enforce_sorted=enforce_sorted)


# --- the same numbers as torch.nn


@CELL
@pytest.mark.parametrize(
    ("layers", "bidirectional", "with_hx"), list(itertools.product([1, 2], [False, True], [False, True]))
)
def test_values_and_gradients(cell, layers, bidirectional, with_hx):
    plain, scan = pair(cell, num_layers=layers, bidirectional=bidirectional)
    hx = hidden(cell, layers, 1 + bidirectional) if with_hx else None
    assert_same(plain, scan, torch.randn(T, B, X, dtype=torch.float64), hx)


@CELL
@pytest.mark.parametrize(
    ("layers", "bidirectional", "enforce_sorted", "with_hx"),
    [(1, False, True, False), (1, False, False, True), (1, True, False, True), (2, True, True, True)],
)
def test_packed_sequences(cell, layers, bidirectional, enforce_sorted, with_hx):
    plain, scan = pair(cell, num_layers=layers, bidirectional=bidirectional)
    hx = hidden(cell, layers, 1 + bidirectional, batch=4) if with_hx else None
    data = packed(enforce_sorted)
    assert_same(plain, scan, data, hx)
    ours, theirs = scan(data)[0], plain(data)[0]
    assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
    assert (ours.sorted_indices is None) == (theirs.sorted_indices is None) == enforce_sorted


@CELL
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_first_and_bias(cell, batch_first, bias):
    plain, scan = pair(cell, batch_first=batch_first, bias=bias)
    data = torch.randn(B, T, X, dtype=torch.float64)
    strided_lstm = cell == "lstm" and batch_first
    assert_same(plain, scan, data, hidden(cell, 1, 1, batch=B if batch_first else T), apart=1e-15 * strided_lstm)
    assert scan(data)[0].shape == plain(data)[0].shape
    for module in (plain, scan):
        module.requires_grad_(False)
    assert torch.equal(scan(data)[0], plain(data)[0])


@CELL
@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_input(cell, batch_first):
    plain, scan = pair(cell, num_layers=2, batch_first=batch_first)
    hx = hidden(cell, 2, 1)
    hx = tuple(state[:, 0] for state in hx) if cell == "lstm" else hx[:, 0]
    assert_same(plain, scan, torch.randn(T, X, dtype=torch.float64), hx)
    assert scan(torch.randn(T, X, dtype=torch.float64))[0].shape == (T, H)


@CELL
@pytest.mark.parametrize("data", [torch.randn(T, B, X, dtype=torch.float64), packed(enforce_sorted=True)])
def test_dropout_draws_the_same_numbers(cell, data):
    plain, scan = pair(cell, num_layers=3, dropout=0.4)
    assert_same(plain, scan, data)
    first, second = (leaves(scan(data))[0] for _ in range(2))
    assert not torch.equal(first, second)
    scan.eval()
    assert_same(plain.eval(), scan, data)


@CELL
@pytest.mark.parametrize("solver", ["auto", "autograd", "blelloch", "sequential", "truncated(2)", "chunk(3)"])
def test_every_solver(cell, solver):
    plain, scan = pair(cell, solver=solver)
    assert_same(plain, scan, torch.randn(33, B, X, dtype=torch.float64))


@CELL
def test_only_the_weights_or_only_the_input(cell):
    plain, scan = pair(cell)
    data = torch.randn(T, B, X, dtype=torch.float64)
    for module in (plain, scan):
        leaves(module(data))[0].sum().backward()
    assert torch.allclose(scan.weight_hh_l0.grad, plain.weight_hh_l0.grad, rtol=0, atol=1e-12)
    gradients = []
    for module in (plain, scan):
        module.requires_grad_(False)
        leaf = data.clone().requires_grad_()
        leaves(module(leaf))[0].sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


# --- a module like torch.nn's


@CELL
def test_constructor_repr_and_state_dict(cell):
    plain, scan = pair(cell, X, H, num_layers=2, bidirectional=True, dropout=0.25, batch_first=True)
    assert repr(scan) == "Scan" + repr(plain).replace("True)", "True, solver='chunk')")
    assert list(scan.state_dict()) == list(plain.state_dict())
    assert scan.state_dict()._metadata == plain.state_dict()._metadata
    torch.manual_seed(5)
    plain.reset_parameters()
    torch.manual_seed(5)
    scan.reset_parameters()
    assert torch.equal(scan.weight_hh_l1_reverse, plain.weight_hh_l1_reverse)
    assert repr(pair(cell, solver="auto")[1]) == "Scan" + repr(pair(cell)[0])


def test_positional_arguments_as_in_torch():
    assert ScanRNN(X, H, 2, "relu", False, True).mode == "RNN_RELU"
    assert repr(ScanRNN(X, H, 2, "relu", False, True)) == "Scan" + repr(nn.RNN(X, H, 2, "relu", False, True))
    assert repr(ScanGRU(X, H, 2, False, True, 0.5, True)) == "Scan" + repr(nn.GRU(X, H, 2, False, True, 0.5, True))


@CELL
def test_copies_and_pickles(cell):
    plain, scan = pair(cell, solver="chunk")
    data = torch.randn(T, B, X, dtype=torch.float64)
    file = io.BytesIO()
    torch.save(scan, file)
    file.seek(0)
    for other in (copy.deepcopy(scan), pickle.loads(pickle.dumps(scan)), torch.load(file, weights_only=False)):
        assert other.solver == "chunk"
        assert other.weight_hh_l0 is not scan.weight_hh_l0
        assert_same(plain, other, data)


def test_device_and_dtype():
    scan = ScanGRU(X, H, device="meta", dtype=torch.float64)
    assert scan.weight_hh_l0.is_meta
    scan = ScanGRU(X, H).double()
    assert scan(torch.randn(T, B, X, dtype=torch.float64))[0].dtype == torch.float64
    assert scan._flat_weights[0] is scan.weight_ih_l0


@CELL
def test_functional_call(cell):
    plain, scan = pair(cell)
    data = torch.randn(T, B, X, dtype=torch.float64)
    other = {name: (0.5 * value).detach().requires_grad_() for name, value in plain.named_parameters()}
    gradients = []
    for module in (plain, scan):
        outputs = leaves(torch.func.functional_call(module, other, (data,)))
        gradients.append(torch.autograd.grad(sum(out.square().sum() for out in outputs), list(other.values())))
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    assert not torch.equal(leaves(scan(data))[0], outputs[0])


@CELL
def test_parametrized_weights(cell):
    plain, scan = pair(cell)
    for module in (plain, scan):
        torch.manual_seed(4)
        parametrizations.weight_norm(module, "weight_hh_l0")
    assert_same(plain, scan, torch.randn(T, B, X, dtype=torch.float64))


def test_a_replaced_weight_is_used():
    plain, scan = pair("gru")
    for module in (plain, scan):
        module.weight_hh_l0 = nn.Parameter(torch.eye(H, dtype=torch.float64).repeat(3, 1))
    assert_same(plain, scan, torch.randn(T, B, X, dtype=torch.float64))


@CELL
def test_compiled(cell):
    plain, scan = pair(cell, num_layers=2, bidirectional=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own
        assert_same(plain, torch.compile(scan, backend="eager"), torch.randn(T, B, X, dtype=torch.float64))


# --- bad input, in torch.nn's words


def message(module, *arguments):
    with pytest.raises((ValueError, RuntimeError, TypeError)) as refusal:
        module(*arguments)
    return str(refusal.value)


@CELL
@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(T, B, X + 1, dtype=torch.float64),
        torch.zeros(T, B, X, 1, dtype=torch.float64),
        torch.zeros(X, dtype=torch.float64),
    ],
)
def test_wrong_input_shape(cell, data):
    plain, scan = pair(cell)
    assert message(scan, data).removesuffix(" instead").removesuffix(" tensor") == (
        message(plain, data).removesuffix(" instead").removesuffix(" tensor")
    )


@CELL
@pytest.mark.parametrize("shape", [(1, B + 1, H), (2, B, H), (1, B, H - 1), (B, H)])
def test_wrong_hidden_shape(cell, shape):
    plain, scan = pair(cell)
    data = torch.zeros(T, B, X, dtype=torch.float64)
    state = torch.zeros(shape, dtype=torch.float64)
    hx = (state, state) if cell == "lstm" else state
    raised = message(scan, data, hx)
    assert raised == message(plain, data, hx) or raised.replace("hidden size", "hidden[0] size") == message(
        plain, data, hx
    )


@CELL
def test_wrong_dtypes(cell):
    scan = pair(cell)[1]
    assert "torch.int64) does not match weight dtype (torch.float64)" in message(scan, torch.zeros(T, B, X).long())
    assert "Convert input: input.to(torch.float64)" in message(scan, torch.zeros(T, B, X))
    with torch.autocast("cpu", torch.bfloat16):
        assert "torch.int64) does not match" in message(scan, torch.zeros(T, B, X).long())
    hx = hidden(cell, 1, 1, dtype=torch.float32)
    assert "convert hx with hx.to(torch.float64)" in message(scan, torch.zeros(T, B, X, dtype=torch.float64), hx)


def test_hidden_of_the_wrong_kind():
    data = torch.zeros(T, B, X)
    state = torch.zeros(1, B, H)
    assert "give the pair (h_0, c_0)" in message(ScanLSTM(X, H), data, state)
    assert "ScanGRU: hx is a tuple; give one tensor" in message(ScanGRU(X, H), data, (state, state))
    assert "give a tensor or a PackedSequence" in message(ScanGRU(X, H), [1.0])


def test_no_steps():
    plain, scan = pair("gru")
    data = torch.zeros(0, B, X, dtype=torch.float64)
    assert message(scan, data) == message(plain, data)


def test_constructor_refuses():
    for kind in (ScanRNN, ScanGRU):
        with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM, not RNN or GRU"):
            kind(X, H, proj_size=2)
    with pytest.raises(ValueError, match=r"ScanLSTM\(proj_size=2\).*use torch.nn.LSTM"):
        ScanLSTM(X, H, proj_size=2)
    with pytest.raises(ValueError, match="Unknown nonlinearity 'elu'"):
        ScanRNN(X, H, nonlinearity="elu")
    with pytest.raises(ValueError, match=r"unknown solver 'quick'.*auto, .*blelloch"):
        ScanGRU(X, H, solver="quick")
