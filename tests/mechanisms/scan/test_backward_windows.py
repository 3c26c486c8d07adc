"""Long sequences: windows of time, whose sums equal the whole, and what is alive meanwhile."""

import gc

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retime.mechanisms.scan import backward as windows
from retime.mechanisms.scan import parse_solver
from retime.mechanisms.scan.cells import BlockJacobians
from support.scan import MODES, Case, gradients, make_case, worst_error


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that an operation made, in memory other than `known`."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.largest = known, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1)
    monkeypatch.setattr(windows, "LEAST_STEPS", 7)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("solver", ["sequential", "chunk", "blelloch"])
def test_windows_give_the_same_gradients(mode: str, bidirectional: bool, solver: str) -> None:
    for steps in (7, 8, 50):
        case = make_case(mode, steps, 3, 4, bidirectional=bidirectional)
        ours = gradients(case.scan(solver), case.leaves)
        assert worst_error(ours, gradients(case.native(), case.leaves)) < 1e-12


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("mode", ["RNN_TANH", "GRU"])
def test_windows_of_packed_sequences(mode: str) -> None:
    case = make_case(mode, 30, 3, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(case.x, [30, 22, 5])
    output, last = case.net(packed, case.state[0])
    expected = gradients([output.data, last], case.leaves)
    packed = torch.nn.utils.rnn.pack_padded_sequence(case.x, [30, 22, 5])
    ours = gradients(case.scan_of(packed.data, "chunk", packed.batch_sizes), case.leaves)
    assert worst_error(ours, expected) < 1e-12


@pytest.mark.usefixtures("short_windows")
def test_double_backward_takes_all_steps_at_once() -> None:
    case = make_case("GRU", 20)
    (first,) = torch.autograd.grad(case.scan("chunk")[0].sum(), case.x, create_graph=True)
    (expected,) = torch.autograd.grad(case.native()[0].sum(), case.x, create_graph=True)
    ours = gradients([first], case.leaves[:2])
    assert worst_error(ours, gradients([expected], case.leaves[:2])) < 1e-12


@pytest.mark.parametrize("solver", ["sequential", "chunk", "blelloch", "truncated(1)", "truncated(2)"])
def test_gradients_of_gradients_are_those_of_the_solver(solver: str) -> None:
    case = make_case("GRU", 6, 2, 3)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(case.scan_of(x, solver)[0].sum(), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(gradient, case.x)


def test_scratch_memory_is_that_of_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(case: Case) -> int:
        outputs = case.scan("sequential")
        sent = torch.randn_like(outputs[0])
        given = {part.untyped_storage().data_ptr() for part in (sent, *outputs, *case.leaves)}
        with LargestTensor(given) as seen:
            torch.autograd.grad(outputs[0], list(case.net.parameters()), sent)
        return seen.largest

    case = make_case("RNN_TANH", 400, 2, 8, inputs=1)
    assert largest(case) >= 400 * 2 * 8
    monkeypatch.setattr(windows, "WINDOW_BYTES", 50 * 2 * 8 * case.x.element_size())
    monkeypatch.setattr(windows, "LEAST_STEPS", 1)
    assert largest(case) <= max(50 * 2 * 8, case.x.numel())


def test_windows_of_large_states_keep_some_steps() -> None:
    saved = torch.empty(10_000, 256, 256, device="meta")
    assert windows.window_steps(saved) == windows.LEAST_STEPS
    assert windows.window_steps(saved[:, :1, :64]) == windows.WINDOW_BYTES // (64 * 4)


def test_a_sweep_leaves_garbage_collection_alone() -> None:
    """A full collection in a process with torch loaded takes longer than a sweep of thousands of steps."""
    jacobians = BlockJacobians(torch.rand(20_000, 1, 1, 2), torch.randn(2, 2))
    collections: list[int] = []

    def note(phase: str, information: dict[str, int]) -> None:
        collections.append(information["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        with torch.no_grad():
            parse_solver("sequential").solve(jacobians, torch.zeros(20_000, 1, 2))
    finally:
        gc.callbacks.remove(note)
    assert len(collections) <= 4
