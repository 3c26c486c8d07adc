"""Gradients of fused backward passes come from the pool, one place for all; a trial decides, and nothing else moves."""

import pytest
import torch
from torch import nn

from retime import fuse_optimizer
from retime.foundations.cpu_pool.pool import MemoryPool
from retime.mechanisms.fusion.gradient_memory import TRIED, WARM_UP

WIDTH, DEPTH = 512, 6  # a weight is 1 MiB
WEIGHT = 4 * WIDTH * WIDTH


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def train(model, optimizer, steps, watch=lambda: None):
    for i in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))
        loss = model(x).square().mean()
        loss.backward()
        watch()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def there(pool):
    """Where there is a pool, and no other user."""
    pool.remove()


class Clock:
    """Backward passes in the pool take ``pooled`` seconds, others one."""

    def __init__(self, pooled):
        self.pooled, self.now, self.began = pooled, 0.0, False
        self.memory = None

    def __call__(self):
        self.began = not self.began
        if not self.began:
            self.now += self.pooled if self.memory._is_pooled() else 1.0
        return self.now


def decided(fusion, pooled):
    """The fusion with a trial that finds this."""
    fusion._memory._clock = clock = Clock(pooled)
    clock.memory = fusion._memory
    return fusion


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize(("pooled", "stays"), [(0.9, True), (1.1, False)])
def test_the_trial_decides(mode, pooled, stays):
    model, optimizer = build()
    fusion = decided(fuse_optimizer(model, optimizer, mode), pooled)
    train(model, optimizer, WARM_UP + 2 * TRIED)
    assert fusion._memory._pool.installed == stays
    train(model, optimizer, 2)
    assert f"{pooled:.3f} of the time" in str(fusion.report())
    assert fusion._memory._pool.installed == stays
    assert fusion._memory._pool.installed == stays
    fusion.remove()
    assert not fusion._memory._pool.installed


@pytest.mark.usefixtures("there")
def test_gradients_share_one_place_and_nothing_else_moves():
    model, optimizer = build()
    fusion = decided(fuse_optimizer(model, optimizer), 0.9)
    train(model, optimizer, WARM_UP + 2 * TRIED)
    counter = MemoryPool(everywhere=False)
    counter.install()
    places = set()
    for layer in model:
        layer.weight.register_hook(lambda gradient: places.add(gradient.data_ptr()))
    counter.reset_peaks()
    live = counter.counts().live
    train(model, optimizer, 3)  # 18 gradients
    counts = counter.counts()
    assert counts.mapped == 0
    assert len(places) <= 4  # the first one of each pass is the C library's, all others have one
    assert counts.peak_live - live < 3 * WEIGHT
    assert counter.bytes_elsewhere([torch.empty(10**6)]) == 4 * 10**6
    counter.remove()
    fusion.remove()


@pytest.mark.usefixtures("there")
def test_deferred_updates_leave_their_gradients_to_the_next_backward_pass():
    model, optimizer = build()
    fusion = decided(fuse_optimizer(model, optimizer, "forward"), 0.9)
    train(model, optimizer, WARM_UP + 2 * TRIED)
    counter = MemoryPool(everywhere=False)
    counter.install()
    counter.reset_peaks()
    train(model, optimizer, 3)
    counts = counter.counts()
    assert counts.mapped == 0
    assert counts.reused >= 3 * (DEPTH - 1) * WEIGHT  # the first one of each pass is the C library's
    counter.remove()
    fusion.remove()


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_weights_are_those_of_the_plain_loop(mode):
    model, optimizer = build()
    fuse_optimizer(model, optimizer, mode)
    train(model, optimizer, WARM_UP + 2 * TRIED + 3)
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, WARM_UP + 2 * TRIED + 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.usefixtures("there")
def test_an_exception_in_a_backward_pass_leaves_the_pool_off():
    model, optimizer = build()
    fusion = fuse_optimizer(model, optimizer)
    train(model, optimizer, 2)

    def fail(gradient):
        raise ArithmeticError

    handle = model[1].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        train(model, optimizer, 1)
    handle.remove()
    fusion.abandon_step()
    assert fusion._memory._pool.bytes_elsewhere([torch.empty(10**6)]) == 4 * 10**6
    optimizer.zero_grad()
    train(model, optimizer, 2)
    fusion.remove()


def test_nothing_is_tried_where_all_tensors_come_from_the_pool(pool):
    model, optimizer = build()
    fusion = fuse_optimizer(model, optimizer)
    train(model, optimizer, 2)
    assert not fusion._memory._pool.installed
    assert "as all large tensors of the process do" in str(fusion.report())
    pool.remove()
    train(model, optimizer, 2)
    assert fusion._memory._pool.installed
    fusion.remove()


def test_small_gradients_need_no_pool():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fusion = fuse_optimizer(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fusion.report().fused_updates > 0
    assert not fusion._memory._pool.installed
    fusion.remove()


def test_without_a_compiler_the_report_says_so(no_compiler):
    model, optimizer = build()
    fusion = fuse_optimizer(model, optimizer)
    train(model, optimizer, 3)
    assert "where the C library puts them: the pool cannot be compiled" in str(fusion.report())
    assert fusion.report().fused_updates > 0
    fusion.remove()
