"""CUDA graphs: between output and gradients no solver reads a value or touches the host. The capture needs a GPU."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retime.mechanisms.scan import backward as safe_solve_module
from retime.mechanisms.scan import parse_solver
from retime.mechanisms.scan.cells import BlockJacobians
from retime.mechanisms.scan.layer import Packing
from retime.mechanisms.scan.triton_launch import why_not
from support.scan import MODES, SOLVERS, Case, make_case, worst_error


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


def moved(case: Case, device: str) -> Case:
    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).requires_grad_()

    return Case(case.mode, copy.deepcopy(case.net).to(device), move(case.x), tuple(move(part) for part in case.state))


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
    case = moved(make_case(mode, 37, bidirectional=bidirectional, dtype=torch.float32), meta)
    outputs = case.scan(solver)
    sent = [torch.empty_like(part) for part in outputs]
    with OnlyOn(meta) as watch:
        ours = torch.autograd.grad(outputs, case.leaves, sent)
    assert watch.calls > 20
    assert [part.shape for part in ours] == [leaf.shape for leaf in case.leaves]


def test_the_check_for_overflow_is_what_reads_otherwise(meta: str) -> None:
    case = moved(make_case("GRU", 5), meta)
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
    case = moved(make_case(mode, 65, 3, 20, dtype=torch.float32), "cuda")
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
