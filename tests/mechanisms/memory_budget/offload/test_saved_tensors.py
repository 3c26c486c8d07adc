"""Saved storages leave and come back: same numbers, each storage once, nothing left behind."""

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory, _MemoryCopy
from retime.mechanisms.memory_budget.offload.passes import ForwardPass
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory_budget.offload.tier import HostError
from retime.schedules.budget import OffloadPlan
from support.memory_budget import offload_all
from support.profiled_steps import convolutions


@pytest.fixture
def host() -> HostMemory:
    return HostMemory("cpu")


@pytest.fixture
def leaf() -> Tensor:
    return torch.ones(5000, requires_grad=True)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("in_flight_bytes", [0, 20_000, 10**9])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_gradients_are_the_same_bit_for_bit(tmp_path: Path, tier: str, prefetch: int, in_flight_bytes: int) -> None:
    model, images = convolutions(), torch.randn(4, 3, 16, 16)
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    model(images).square().sum().backward()
    host = HostMemory("cpu") if tier == "memory" else HostDisk(tmp_path)
    keep = [*twin.parameters(), *twin.buffers(), images]
    offload = offload_all(host, keep, prefetch=prefetch, in_flight_bytes=in_flight_bytes)
    for _ in range(2):  # the second pass uses places and buffers of the first again
        twin.load_state_dict(start)
        twin.zero_grad()
        with offload:
            loss = twin(images).square().sum()
        loss.backward()
        assert all(torch.equal(one, two) for one, two in zip(gradients(model), gradients(twin), strict=True))
    del loss
    assert host.live_bytes() == 0
    report = offload.report()
    assert report.passes == 2
    assert (report.prefetched > 0) == (prefetch > 0 and in_flight_bytes < 10**9)
    assert report.bytes_in == (0 if in_flight_bytes == 10**9 else pytest.approx(report.bytes_out, abs=20_000 * 2 + 1))
    host.close()


def test_views_of_a_storage_move_once_and_come_back_as_one_storage(host: HostMemory) -> None:
    base = torch.arange(24.0).requires_grad_()
    whole = base * 1  # 96 bytes, of which three windows are saved
    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *windows: Tensor) -> Tensor:
            ctx.save_for_backward(*windows)
            return torch.ones(())

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[None, ...]:
            windows = ctx.saved_tensors
            seen.extend(window.untyped_storage().data_ptr() for window in windows)
            for window, like in zip(windows, expected, strict=True):
                assert torch.equal(window, like)
                assert (window.stride(), window.storage_offset()) == (like.stride(), like.storage_offset())
                assert window.dtype == like.dtype
            return (None,) * len(windows)

    def windows(tensor: Tensor) -> list[Tensor]:
        tensor = tensor.detach()
        return [tensor, tensor.view(4, 6).t(), tensor[3:9:2], tensor.view(torch.int32)[1:2]]

    expected = windows(base)
    with offload_all(host, [base]) as offload:
        out = Look.apply(whole, *windows(whole)[1:])
    del whole
    out.backward()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    report = offload.report()
    assert (report.storages, report.bytes_out, report.bytes_in) == (1, 96, 96)
    assert report.bytes_skipped == 96 + 3 * 4 + 4


@pytest.mark.parametrize("make", [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.real])
def test_lazy_flags_survive(host: HostMemory, make: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(5, dtype=torch.complex64)

    def gradient(context: AbstractContextManager[object]) -> Tensor:
        leaf = torch.ones(5, dtype=torch.complex64).requires_grad_()
        with context:
            out = (leaf * make(values * 1)).abs().sum()
        out.backward()
        return leaf.grad

    assert torch.equal(gradient(nullcontext()), gradient(offload_all(host)))


def test_kept_and_odd_tensors_stay(host: HostMemory) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    with offload_all(host, [weight]) as offload:
        hidden = torch.sparse.mm(sparse, weight.t() * 1)
        empty = (torch.empty(0, 4, requires_grad=True) @ weight).exp()
        out = hidden.sum() + empty.sum() + (weight @ weight).sum()
    out.backward()
    assert offload.report().storages == 0
    reference = torch.full((4, 4), 1.0)
    ones = torch.ones(4, 4)
    expected = reference + ones @ weight.detach().t() + weight.detach().t() @ ones
    assert torch.allclose(weight.grad, expected)


def test_an_edit_in_place_raises_as_autograd_does(host: HostMemory) -> None:
    def edited(context: AbstractContextManager[object]) -> str:
        leaf = torch.randn(3, requires_grad=True)
        with context:
            middle = leaf.exp()
        loss = middle.sum()
        middle.detach().mul_(2)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return str(caught.value)

    start = "one of the variables needed for gradient computation has been modified by an inplace operation"
    kept = OffloadSavedTensors(OffloadPlan(1), host)
    for message in map(edited, (nullcontext(), offload_all(host), kept)):
        assert message.startswith(start)
        assert "is at version 1; expected version 0" in message


def test_an_edit_before_the_second_save_is_another_storage_state(host: HostMemory) -> None:
    def run(context: OffloadSavedTensors) -> Tensor:
        leaf = torch.ones(3, requires_grad=True)
        buffer = torch.full((3,), 2.0)
        with context:
            first = (leaf * buffer).sum()  # saves the buffer
            del first
            buffer.add_(1)
            second = (leaf * buffer).sum()  # saves it with other contents
        second.backward()
        return leaf.grad

    assert run(offload_all(host)).tolist() == [3.0] * 3


def test_a_kept_graph_can_run_backward_again(host: HostMemory) -> None:
    model, images = convolutions(norm=False), torch.randn(2, 3, 8, 8)
    with offload_all(host, [*model.parameters(), images], prefetch=2) as offload:
        loss = model(images).square().sum()
    loss.backward(retain_graph=True)
    once, first = gradients(model), offload.report().bytes_in
    assert host.live_bytes() == offload.report().bytes_out  # the graph is kept, so is the host's copy
    loss.backward()
    assert all(torch.equal(2 * one, two) for one, two in zip(once, gradients(model), strict=True))
    assert offload.report().bytes_in == 2 * first
    assert host.live_bytes() == 0


def test_a_backward_pass_through_a_part_holds_nothing_that_was_fetched_ahead(host: HostMemory, leaf: Tensor) -> None:
    with offload_all(host, [leaf], prefetch=3):
        first = leaf.exp()
        second = first.sin().exp()
        edge = torch.autograd.graph.get_gradient_edge(second)
        loss = second.sin().exp().sum()
    del first, second  # what is held has not left
    fetched: list[weakref.ref] = []
    load = _MemoryCopy.load

    def watched(self: object, into: torch.UntypedStorage) -> object:
        fetched.append(weakref.ref(into))
        return load(self, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retime.mechanisms.memory_budget.offload.hosts._MemoryCopy.load", watched)
        torch.autograd.grad(loss, edge, retain_graph=True)
    assert fetched
    assert all(one() is None for one in fetched)


def test_second_derivatives(host: HostMemory) -> None:
    def second(context: AbstractContextManager[object]) -> Tensor:
        leaf = torch.tensor([0.3, 0.7], requires_grad=True)
        with context:
            out = leaf.sin().exp().sum()
        (slope,) = torch.autograd.grad(out, leaf, create_graph=True)
        return torch.autograd.grad(slope.sum(), leaf)[0]

    assert torch.equal(second(nullcontext()), second(offload_all(host)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments(host: HostMemory, reentrant: bool) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        torch.manual_seed(1)
        one, two = nn.Linear(6, 6), nn.Linear(6, 6)
        values = torch.randn(4, 6)
        if isinstance(context, OffloadSavedTensors):
            context.keep = [*one.parameters(), *two.parameters(), values]
        with context:
            hidden = one(values).tanh()
            hidden = checkpoint(lambda t: two(t).tanh().exp(), hidden, use_reentrant=reentrant)
            loss = hidden.square().sum()
        loss.backward()
        return [parameter.grad for parameter in (*one.parameters(), *two.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(nullcontext()), run(offload_all(host)), strict=True))
    assert host.live_bytes() == 0


def test_contexts_nest_and_the_inner_one_decides(host: HostMemory) -> None:
    leaf = torch.randn(4, requires_grad=True)
    inner_host = HostMemory("cpu")
    with offload_all(host, [leaf]) as outer:
        first = leaf.exp()
        with offload_all(inner_host, [leaf]) as inner:
            second = first.exp()
        third = second.sin()
        del first, second
    third.sum().backward()
    x = leaf.detach()
    assert torch.allclose(leaf.grad, x.exp().exp().cos() * x.exp().exp() * x.exp())
    assert (outer.report().storages, inner.report().storages) == (2, 1)
    with pytest.raises(RuntimeError, match="already around a forward pass"), outer, outer:
        pass


def test_copies_in_flight_are_bounded(host: HostMemory) -> None:
    leaf = torch.ones(256, requires_grad=True)  # 1024 bytes each
    alive: list[weakref.ref] = []
    with offload_all(host, [leaf], in_flight_bytes=3000):
        value = leaf
        for _ in range(8):
            value = value.exp()
            alive.append(weakref.ref(value.untyped_storage()))
            value = value * 1.0
            assert sum(one() is not None for one in alive) <= 3
    value.sum().backward()


def test_another_number_of_saves_is_reported(host: HostMemory) -> None:
    leaf = torch.ones(4, requires_grad=True)

    def forward(offload: OffloadSavedTensors, times: int) -> Tensor:
        with offload:
            value = leaf
            for _ in range(times):
                value = value.exp()
        return value.sum()

    plan = OffloadPlan(1, frozenset({0, 1}), 0, 2)
    forward(OffloadSavedTensors(plan, host, [leaf]), 2).backward()
    with pytest.raises(PlanMismatch, match="saved 3 storages, but its plan has 2") as caught:
        forward(OffloadSavedTensors(plan, host, [leaf]), 3)
    assert (caught.value.saved, caught.value.planned) == (3, 2)
    assert host.live_bytes() == 0
    mismatches: list[PlanMismatch] = []
    offload = OffloadSavedTensors(plan, host, [leaf], on_mismatch=mismatches.append)
    forward(offload, 3).backward()
    assert [mismatch.saved for mismatch in mismatches] == [3]
    assert offload.report().mismatches == 1


def test_passes_are_left_alone_behind_the_last_storage_that_moves(
    host: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass shows where that is; its storages may be saved again long after others were."""
    packed: list[int] = []
    pack = ForwardPass.pack

    def counted(self: ForwardPass, tensor: Tensor) -> Any:
        packed[-1] += 1
        return pack(self, tensor)

    monkeypatch.setattr(ForwardPass, "pack", counted)
    leaf = torch.linspace(0, 1, 1000, requires_grad=True)
    mismatches: list[PlanMismatch] = []
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0}), 0, 9), host, [leaf], on_mismatch=mismatches.append)

    def gradient(longer: bool = False) -> Tensor:
        leaf.grad = None
        packed.append(0)
        with offload:
            first = leaf.exp()  # saves 0
            value = first.sin().sin() * first  # saves 0 twice more, 1, and 2
            del first
            for _ in range(7 if longer else 6):
                value = value.tanh()
        value.sum().backward()
        return leaf.grad

    first = gradient()
    moved = offload.report().bytes_out
    assert [torch.equal(gradient(), first) for _ in range(3)] == [True] * 3
    assert offload.report().bytes_out == 4 * moved == 4 * leaf.nbytes
    assert packed == [11, 5, 5, 5]  # the next new one ends it
    gradient(longer=True)
    assert mismatches == []
    gradient(longer=True)
    assert [mismatch.saved for mismatch in mismatches] == [10]  # another number of nodes: watched from now on
    gradient()
    assert packed[-3:] == [5, 12, 11]
    assert offload.report().mismatches == 1
    assert host.live_bytes() == 0


def test_an_error_behind_the_end_leaves_nothing(host: HostMemory, leaf: Tensor) -> None:
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0}), 0, 3), host, [leaf])
    for fails in (False, True):
        with suppress(KeyError), offload:
            leaf.exp().exp().exp()
            if fails:
                raise KeyError
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert host.live_bytes() == 0
    with offload:
        leaf.exp().exp().exp()
        with pytest.raises(RuntimeError, match="already around a forward pass"):
            offload.__enter__()


def test_hooks_around_others_go_on_to_the_end(host: HostMemory, leaf: Tensor) -> None:
    """Or those around them would be given some passes' tensors, and not others'."""
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0}), 0, 3), host, [leaf])
    outer: list[Tensor] = []
    for _ in range(3):
        with saved_tensors_hooks(lambda tensor: outer.append(tensor), lambda _: leaf), offload:  # type: ignore[func-returns-value]
            leaf.exp().exp().exp()
    assert outer == []


def test_a_short_first_pass_does_not_end_later_ones_early(host: HostMemory, leaf: Tensor) -> None:
    mismatches: list[PlanMismatch] = []
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0, 3}), 0, 5), host, [leaf], on_mismatch=mismatches.append)
    for layers in (2, 5, 5):
        with offload:
            value = leaf
            for _ in range(layers):
                value = value.exp()
    assert len(mismatches) == 1
    assert offload.report().storages == 1 + 2 + 2


def test_every_17th_pass_is_watched_to_its_end(host: HostMemory, leaf: Tensor) -> None:
    mismatches: list[PlanMismatch] = []
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0}), 0, 1), host, [leaf], on_mismatch=mismatches.append)
    for step in range(18):
        with offload:
            first = leaf.exp()
            second = first * 2 if step == 0 else first.exp()  # as many nodes, but one more saves
            second.sum().backward()
        assert len(mismatches) == (step == 17)


def test_hooks_of_the_model_stay_in_force_when_ours_end(host: HostMemory, leaf: Tensor) -> None:
    offload = OffloadSavedTensors(OffloadPlan(1, frozenset({0}), 0, 3), host, [leaf])
    own: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        own.append(tensor.detach())
        return own[-1]

    for _ in range(2):
        with offload:
            value = leaf.exp().exp().exp()
            with saved_tensors_hooks(keep, lambda kept: kept):
                value = value.exp()
        value.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert len(own) == 2
    assert offload.report().storages == 2


def test_an_exception_in_the_forward_pass_leaves_nothing_behind(tmp_path: Path, leaf: Tensor) -> None:
    threads = set(threading.enumerate())
    graphs = []
    with HostDisk(tmp_path) as host:
        offload = offload_all(host, [leaf], in_flight_bytes=10**6)

        def fail() -> None:
            with offload:
                graphs.append(leaf.exp().sin())  # somebody still holds the graph
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert host.live_bytes() == 0
        with pytest.raises(RuntimeError, match="forward pass that saved this tensor failed"):
            graphs[0].sum().backward()
        with offload:
            loss = leaf.exp().sum()
        loss.backward()
        assert torch.equal(leaf.grad, leaf.detach().exp())
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []


def test_a_graph_that_is_dropped_gives_its_space_back(tmp_path: Path, leaf: Tensor) -> None:
    with HostDisk(tmp_path) as host:
        for _ in range(3):
            with offload_all(host, [leaf]):
                loss = leaf.exp().exp().sum()
            assert host.live_bytes() == 40_000
            del loss
            gc.collect()
            assert host.live_bytes() == 0
        assert host._extents.end == 2 * 20_480  # the same two places, in whole pages, every time


def test_a_failed_write_fails_the_forward_pass_or_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf: Tensor
) -> None:

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with HostDisk(tmp_path) as host:
        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(HostError, match="could not be written to"), offload_all(host, [leaf]):
            loss = leaf.exp().sum()
        offload = offload_all(host, [leaf], in_flight_bytes=10**6)
        gate = threading.Event()
        host._pool.submit(gate.wait)  # the failure comes after the forward pass
        with offload:
            loss = leaf.exp().sum()
        gate.set()
        loss.backward()
        assert torch.equal(leaf.grad, leaf.detach().exp())
        with pytest.raises(HostError, match="could not be written to"), offload:
            pass
        monkeypatch.undo()


def test_numbers_do_not_depend_on_what_moves(host: HostMemory) -> None:
    """A logged value that takes no part in the loss frees its graph at once; what it saved is saved again later."""
    mismatches: list[PlanMismatch] = []
    gradient = {}
    for name, numbers in {"plain": (), "all": range(3)}.items():
        value = torch.linspace(-1, 1, 64, requires_grad=True)
        plan = OffloadPlan(1, frozenset(numbers), 0, saved=3)
        with OffloadSavedTensors(plan, host, on_mismatch=mismatches.append) as offload:
            hidden = value.tanh()  # saves its result, 0
            float(hidden.norm().detach())  # saves that again and the norm, 1
            float((hidden * hidden).sum().detach())
            loss = (hidden * hidden.exp()).sum()  # saves it once more, and the exponential, 2
            del hidden
        loss.backward()
        gradient[name] = value.grad
        assert offload.report().storages == (2 if name == "all" else 0)
    assert not mismatches
    assert torch.equal(gradient["plain"], gradient["all"])  # type: ignore[arg-type]


def test_a_failed_read_says_that_gradients_are_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = torch.ones(5000, requires_grad=True)
    with HostDisk(tmp_path) as host:
        with offload_all(host, [leaf]):
            loss = leaf.exp().sum()
        monkeypatch.setattr(os, "preadv", lambda *args: 0)
        with pytest.raises(HostError, match="zero them"):
            loss.backward()


def test_half_precision_integers_and_doubles(host: HostMemory) -> None:
    index = torch.tensor([2, 0, 1])

    def run(context: AbstractContextManager[object]) -> Tensor:
        leaf = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with context:
            half = leaf.to(torch.bfloat16).exp()
            out = half.double().square().gather(0, (index * 1)[:, None].expand(3, 4)).sum()
        out.backward()
        return leaf.grad

    offload = offload_all(host)
    assert torch.equal(run(nullcontext()), run(offload))
    assert offload.report().storages >= 3
