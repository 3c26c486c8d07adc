"""The layer: what it saves, autocast, half precision, bad input, when it stays out of the way, and CUDA graphs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retime.mechanisms.scan import backward as safe_solve_module
from retime.mechanisms.scan import parse_solver, scan_layer
from retime.mechanisms.scan.cells import BlockJacobians
from retime.mechanisms.scan.layer import Packing
from retime.mechanisms.scan.triton_launch import why_not
from support.scan import MODES, SOLVERS, gradients, make_case, worst_error


def saved_bytes(outputs: list[torch.Tensor], weights: set[int]) -> int:
    node = outputs[0].grad_fn
    kept = {part.data_ptr(): part.nbytes for part in node.saved_tensors if part is not None}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


@pytest.mark.parametrize("mode", MODES)
def test_saves_input_first_states_and_output_only(mode: str) -> None:
    case = make_case(mode, 50, 2, 6)
    case.state = tuple(part.detach() for part in case.state)
    outputs = case.scan("chunk")
    expected = case.x.nbytes + outputs[0].nbytes + sum(part.nbytes for part in case.state)
    assert saved_bytes(outputs, {weight.data_ptr() for weight in case.net.parameters()}) == expected


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_saved_without_gradients(mode: str) -> None:
    case = make_case(mode)
    with torch.no_grad():
        assert case.scan("chunk")[0].grad_fn is None
    case.x.requires_grad_(False)
    for tensor in (*case.state, *case.net.parameters()):
        tensor.requires_grad_(False)
    assert not case.scan("chunk")[0].requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_ordinary_tensors(mode: str) -> None:
    """Forward passes may run in inference mode; what they give can be saved, changed and trained on."""
    case = make_case(mode, 20, 2, 3)
    outputs = case.scan("chunk")
    assert not any(part.is_inference() for part in outputs)
    sum(part.square().sum() for part in outputs).backward()
    with torch.no_grad():
        outputs[0].mul_(2)
    assert case.x.grad is not None


def test_autograd_is_a_solver() -> None:
    case = make_case("GRU")
    assert "ScanFunction" not in case.scan("autograd")[0].grad_fn.name()
    assert worst_error(gradients(case.scan("autograd"), case.leaves), gradients(case.native(), case.leaves)) == 0


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode: str) -> None:
    case = make_case(mode, 20, 2, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            native = case.native()
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):  # oneDNN has none for some processors
                raise
            pytest.skip(f"torch's own {mode} does not run in bfloat16 here: {error}")
        scan = case.scan("chunk")
    assert [part.dtype for part in scan] == [part.dtype for part in native]
    assert all(torch.equal(a, b) for a, b in zip(scan, native, strict=True))
    ours = gradients(scan, case.leaves)
    assert all(part.dtype == torch.float32 for part in ours)
    assert worst_error(ours, gradients(case.native(), case.leaves)) < 0.05


def test_backward_inside_autocast_stays_in_float32() -> None:
    case = make_case("GRU", 20, 2, 6, dtype=torch.float32)
    outputs = case.scan("chunk")
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(outputs, case.leaves)
    assert worst_error(ours, gradients(case.native(), case.leaves)) < 1e-5


def test_bfloat16_layers() -> None:
    case = make_case("GRU", 20, 2, 6, dtype=torch.bfloat16)
    scan = case.scan("chunk")
    assert torch.equal(scan[0], case.native()[0])
    ours = gradients(scan, case.leaves)
    assert all(part.dtype == torch.bfloat16 for part in ours)
    assert worst_error(ours, gradients(case.native(), case.leaves)) < 0.1


def test_functional_transforms() -> None:
    case = make_case("GRU", 5)
    weights = tuple(weight.detach() for weight in case.net.parameters())

    def loss(x: torch.Tensor) -> torch.Tensor:
        return scan_layer("GRU", x, case.state[0][0].detach(), *weights, solver="chunk")[0].square().sum()

    (expected,) = torch.autograd.grad(case.native()[0].square().sum(), case.x)
    torch.testing.assert_close(torch.func.grad(loss)(case.x.detach()), expected)


def test_bad_input_says_what_to_change() -> None:
    case = make_case("GRU")
    w_ih, w_hh, b_ih, b_hh = case.net.parameters()
    with pytest.raises(ValueError, match="use one of RNN_TANH"):
        scan_layer("gru", case.x, case.state[0][0], w_ih, w_hh, b_ih, b_hh)
    with pytest.raises(ValueError, match="give both, or neither"):
        scan_layer("GRU", case.x, case.state[0][0], w_ih, w_hh, b_ih, None)
    with pytest.raises(ValueError, match="unknown solver"):
        scan_layer("GRU", case.x, case.state[0][0], w_ih, w_hh, b_ih, b_hh, solver="fast")


@pytest.mark.parametrize("mode", MODES)
def test_no_sequences(mode: str) -> None:
    case = make_case(mode, 20, 0, 3)
    ours = torch.autograd.grad(case.scan("chunk")[0].sum(), case.leaves, allow_unused=True)
    expected = torch.autograd.grad(case.native()[0].sum(), case.leaves, allow_unused=True)
    assert all((a is None) == (b is None) for a, b in zip(ours, expected, strict=True))
    assert all(a is None or torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch.func itself
def test_forward_mode_derivatives_need_torchs_own_pass() -> None:
    case = make_case("GRU", 20)
    x = case.x.detach()
    with pytest.raises(RuntimeError, match=r"forward-mode.*solver='autograd'"):
        torch.func.jvp(lambda part: case.scan_of(part, "chunk")[0], (x,), (x,))
    _, along = torch.func.jvp(lambda part: case.scan_of(part, "autograd")[0], (x,), (x,))
    assert along.shape == (20, 2, 3)


class OnlyOn(TorchDispatchMode):
    """Fails where a call touches a tensor of another device, or makes one: a copy from or to the host."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves((args, kwargs, results)):
            assert not isinstance(tensor, Tensor) or tensor.device.type == self.device, func
        return results


@pytest.fixture
def as_if_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (safe_solve_module, __import__("sys").modules[Packing.__module__]):
        monkeypatch.setattr(module, "capturing", lambda device: True)


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device whose tensors have no values. torch.autocast, a flag of the host, does not know it."""
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **options: nullcontext())
    return "meta"


@pytest.mark.usefixtures("as_if_capturing")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_depends_on_values(meta: str, solver: str, mode: str, bidirectional: bool) -> None:
    """Tensors without values: whatever reads one raises."""
    case = make_case(mode, 37, bidirectional=bidirectional, dtype=torch.float32).to(meta)
    outputs = case.scan(solver)
    sent = [torch.empty_like(part) for part in outputs]
    with OnlyOn(meta) as watch:
        ours = torch.autograd.grad(outputs, case.leaves, sent)
    assert watch.calls > 20
    assert [part.shape for part in ours] == [leaf.shape for leaf in case.leaves]


def test_the_check_for_overflow_is_what_reads_otherwise(meta: str) -> None:
    case = make_case("GRU", 5).to(meta)
    outputs = case.scan("chunk")
    with pytest.raises(RuntimeError, match="meta"):
        torch.autograd.grad(outputs[0], case.leaves, torch.empty_like(outputs[0]))
    sequential = case.scan("sequential")[0]
    torch.autograd.grad(sequential, case.leaves, torch.empty_like(sequential))  # forms nothing that needs the check


@pytest.mark.usefixtures("as_if_capturing")
def test_what_overflows_while_capturing_is_left_as_it_is() -> None:
    jacobians = BlockJacobians(torch.full((200, 1, 1, 2), 1e30), torch.eye(2))
    gradient = torch.zeros(200, 1, 2)
    with torch.no_grad():
        _, carry = safe_solve_module.safe_solve(parse_solver("blelloch"), jacobians, gradient)
    assert torch.isnan(carry).any()


@pytest.mark.usefixtures("as_if_capturing")
def test_packed_sequences_refuse() -> None:
    with pytest.raises(RuntimeError, match="Pad them"):
        Packing(torch.tensor([2, 1]), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("solver", [*SOLVERS, "triton"])
def test_replays_equal_eager_steps(solver: str, mode: str) -> None:
    if solver == "triton" and (reason := why_not(mode, 20, torch.float32, torch.device("cuda"))):
        pytest.skip(reason)
    case = make_case(mode, 65, 3, 20, dtype=torch.float32).to("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sent = [torch.randn_like(part) for part in case.scan(solver)]
        torch.autograd.grad(case.scan(solver), case.leaves, sent)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = torch.autograd.grad(case.scan(solver), case.leaves, sent)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (case.x, *sent):
                tensor.normal_()
        graph.replay()
        eager = torch.autograd.grad(case.scan(solver), case.leaves, sent)
        assert worst_error(list(replayed), list(eager)) < 1e-6
