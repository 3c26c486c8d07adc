"""DDP's one communication hook: one owner at a time, a refusal that names it, a slot that is given back; agreement."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import DeviceReducer, OwnGroupsReducer, RankAgreement, Reducer, comm_hook_of
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.mechanisms.cpu_accumulation import shared_sums as sums
from retime.mechanisms.fusion import ReductionHook, fuse_optimizer
from retime.mechanisms.out_of_order import OutOfOrderDataParallel, data_parallel
from support.time_limits import limit_s

pytestmark = pytest.mark.usefixtures("one_rank")


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return DistributedDataParallel(net, gradient_as_bucket_view=True)


def fuses(model: DistributedDataParallel) -> Callable[[], None]:
    return fuse_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), "backward").remove


def reduces_on_host(model: DistributedDataParallel) -> Callable[[], None]:
    return BucketReduction(model, HostReducer()).close


def reorders(model: DistributedDataParallel) -> Callable[[], None]:
    with pytest.MonkeyPatch.context() as patch:  # one process has nothing to re-order
        patch.setattr(data_parallel.dist, "get_world_size", lambda *_: 2)
        return OutOfOrderDataParallel(model, k=0).remove


OWNERS = {
    "backward fusion": fuses,
    "a reduction in host memory": reduces_on_host,
    "out-of-order data parallel": reorders,
}
PAIRS = list(permutations(OWNERS, 2))


def gradients(model: DistributedDataParallel) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_second_owner_is_told_who_has_the_hook(first: str, second: str) -> None:
    model = wrapped()
    OWNERS[first](model)
    text = rf"{second} needs DDP's communication hook.*has one already \({first}\): remove that first, or \w+"
    with pytest.raises(ValueError, match=text):
        OWNERS[second](model)


@pytest.mark.parametrize("name", OWNERS)
def test_a_hook_of_the_users_own_is_named(name: str) -> None:
    model = wrapped()
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=rf"{name} needs .* has one already \(allreduce_hook\): \w+"):
        OWNERS[name](model)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_slot_that_is_given_back_can_be_taken_by_another(first: str, second: str) -> None:
    model, expected = wrapped(), gradients(wrapped())
    OWNERS[first](model)()
    assert comm_hook_of(model).owner is None
    assert all(map(torch.equal, gradients(model), expected))
    OWNERS[second](model)()
    assert all(map(torch.equal, gradients(model), expected))


def test_two_fusions_share_it_and_the_last_gives_it_back() -> None:
    model = wrapped()
    one, two = fuses(model), fuses(model)
    one()
    assert comm_hook_of(model).owner is not None
    two()
    assert comm_hook_of(model).owner is None


def test_a_copy_of_a_model_has_a_free_slot() -> None:
    model = wrapped()
    reduces_on_host(model)
    twin = copy.deepcopy(model)
    assert comm_hook_of(twin).owner is None
    assert comm_hook_of(twin) is not comm_hook_of(model)
    reducer = HostReducer()
    BucketReduction(twin, reducer)
    gradients(twin)
    assert reducer.bytes_out


@pytest.mark.parametrize("name", OWNERS)
def test_an_owner_lives_and_goes_with_its_model(name: str) -> None:
    model = wrapped()
    OWNERS[name](model)
    gc.collect()
    owner, gone = weakref.ref(comm_hook_of(model).owner), weakref.ref(model)  # type: ignore[arg-type]
    assert owner() is not None
    del model
    gc.collect()
    assert gone() is None
    if name != "backward fusion":  # which lives in its parameters' hooks too, until it is removed
        assert owner() is None


@pytest.mark.parametrize("make", [DeviceReducer, HostReducer, OwnGroupsReducer])
def test_reducers_sum(make: Any) -> None:
    reducer: Reducer = make()
    values = torch.arange(4.0)
    for urgent in (False, True):
        assert reducer.start(0, values, urgent=urgent).wait().data_ptr() == values.data_ptr()
        assert torch.equal(values, torch.arange(4.0))
    reducer.close()
    reducer.abort()


def test_an_aborted_host_reducer_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer, begun, others_come = HostReducer(), threading.Event(), threading.Event()
    monkeypatch.setattr(sums.dist, "all_reduce", lambda *_, **__: begun.set() or others_come.wait(limit_s(60)))
    done = [reducer.start(key, torch.ones(2)) for key in range(2)]
    assert begun.wait(limit_s(60))
    reducer.abort()
    assert not any(future.done() for future in done)
    others_come.set()
    done[0].wait()
    assert not done[1].done()  # it had not begun


def test_a_reduction_that_cannot_be_made_closes_its_reducer_and_leaves_the_slot() -> None:
    model, plain, closed = wrapped(), wrapped(), []

    class Closes(DeviceReducer):
        def close(self) -> None:
            closed.append(self)

    kept = fuses(model)
    with pytest.raises(ValueError, match="backward fusion"):
        BucketReduction(model, Closes())
    assert len(closed) == 1
    kept()
    assert comm_hook_of(model).owner is None
    assert all(torch.equal(*both) for both in zip(gradients(model), gradients(plain), strict=True))


def test_a_reducer_takes_the_place_of_a_users_hook() -> None:
    with pytest.raises(ValueError, match="leave out one of the two"):
        ReductionHook(wrapped(), allreduce_hook, reducer=DeviceReducer())


@pytest.mark.parametrize("number", [0.25, -3.5, 0.0, float(2**32 - 1), float(2**53)])
def test_numbers_that_ranks_agree_on_come_back_as_they_are(number: float) -> None:
    assert RankAgreement().largest(lambda: number, "choose") == number


def test_a_given_group_is_used_and_left() -> None:
    group = dist.new_group([0])
    agreement = RankAgreement(group=group)
    assert agreement.largest(lambda: 1.5, "choose") == 1.5
    agreement.close()
    dist.all_reduce(torch.ones(1), group=group)


def test_an_error_is_raised_where_it_happened() -> None:
    def fails() -> float:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        RankAgreement(group=dist.group.WORLD).largest(fails, "choose")
