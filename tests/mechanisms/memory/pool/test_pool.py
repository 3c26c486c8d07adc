"""The pool of CPU tensors: bytes live, kept, mapped and reused; forks, threads, outliving tensors, no compiler."""

import gc
import os
import re
import threading

import pytest
import torch

from retime.mechanisms.memory.host.parse import parse_host
from retime.mechanisms.memory.pool import freed_memory
from retime.mechanisms.memory.pool import library as library_module
from retime.mechanisms.memory.pool import memory_pool as pool_module
from retime.mechanisms.memory.pool.freed_memory import FreedMemory
from retime.mechanisms.memory.pool.memory_pool import MemoryPool
from retime.mechanisms.memory.step.budgeted_step import BudgetedStep

PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
BLOCK = 256 * PAGE


def block(size=BLOCK):
    return torch.empty(size, dtype=torch.uint8)


class TestCounts:
    def test_small_tensors_are_not_the_pools(self, pool):
        before = pool.counts().live
        small, large = block(16 * 1024 - 1), block(16 * 1024)
        assert pool.counts().live - before == 16 * 1024
        assert pool.bytes_elsewhere([small, large, small[:5]]) == 16 * 1024 - 1

    def test_freed_memory_is_used_again(self, pool):
        pool.limit(pool.counts().live + 4 * BLOCK)
        first = block()
        place = first.data_ptr()
        del first
        assert pool.counts().kept >= BLOCK
        assert block().data_ptr() == place
        assert pool.counts().reused == BLOCK

    def test_nothing_is_kept_beyond_the_limit(self, pool):
        base = pool.counts().live
        pool.limit(base + 3 * BLOCK)
        some = [block() for _ in range(4)]  # live tensors are not limited
        assert pool.counts().live == base + 4 * BLOCK
        del some[0]
        assert pool.counts().kept == 0
        del some
        assert base + pool.counts().kept == base + 3 * BLOCK
        pool.limit(0)
        assert pool.counts().kept == 0

    def test_held_bytes_stay_below_the_limit(self, pool):
        base = pool.counts().live
        pool.limit(base + 8 * BLOCK)
        pool.reset_peaks()
        for size in (5, 3, 7, 2, 6, 8, 1, 4):  # none fits what is kept of the one before without giving some back
            block(size * BLOCK)
        assert pool.counts().peak_held <= base + 8 * BLOCK
        assert pool.counts().peak_live == base + 8 * BLOCK

    def test_neighbours_become_one(self, pool):
        pool.limit(pool.counts().live + 100 * BLOCK)
        whole = block(4 * BLOCK)
        del whole
        parts = [block() for _ in range(4)]
        del parts
        pool.reset_peaks()
        whole = block(4 * BLOCK)
        assert pool.counts().mapped == 0
        assert len(whole) == 4 * BLOCK

    def test_smallest_that_fits_is_taken(self, pool):
        pool.limit(pool.counts().live + 100 * BLOCK)
        large, wall, small = block(9 * BLOCK), block(), block(2 * BLOCK)
        place = small.data_ptr()
        end = block()  # so that the freed ones do not touch what is free beside them
        del large, small
        assert block(2 * BLOCK).data_ptr() == place
        del wall, end


def test_values_survive_the_pool_and_the_other_way_round(pool):
    old = torch.arange(10**5)
    pool.remove()
    new = torch.arange(10**5)
    assert torch.equal(old, new)
    del old  # its memory goes back by the pool, which is no longer installed
    with pytest.raises(RuntimeError, match="install"):
        pool.counts()


def test_the_last_of_its_users_takes_it_away(pool):
    others = pool_module._installed - 1
    second = MemoryPool()
    second.install()
    second.install()  # twice is once
    second.remove()
    second.remove()
    assert pool.bytes_elsewhere([block()]) == 0
    pool.remove()
    between = block()
    pool.install()
    assert pool.bytes_elsewhere([between]) == (0 if others else BLOCK)
    assert pool.bytes_elsewhere([block()]) == 0


def test_one_that_was_forgotten_is_removed(pool):
    before = pool_module._installed
    forgotten = MemoryPool()
    forgotten.install()
    assert pool_module._installed == before + 1
    del forgotten
    gc.collect()
    assert pool_module._installed == before


def test_one_dnns_scratch_can_be_allocated(pool):
    image = torch.randn(2, 16, 64, 64, requires_grad=True)
    convolution = torch.nn.Conv2d(16, 16, 3)
    convolution(image).sum().backward()
    assert image.grad is not None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_and_forks(pool):
    pool.limit(pool.counts().live + 20 * BLOCK)

    def work():
        for size in range(1, 40):
            assert int(block(size * PAGE * 16).fill_(1).sum()) == size * PAGE * 16

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if not child:
        os._exit(0 if len(block()) == BLOCK else 1)
    assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """As where there is none; how often the C library was asked instead. It is not, as it cannot be asked back."""
    asked = []
    monkeypatch.setattr(freed_memory, "give_back_freed_memory", lambda: asked.append(True) or True)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library_module.pool_library.cache_clear()
    yield asked
    library_module.pool_library.cache_clear()


def test_without_a_compiler_freed_memory_goes_back(no_compiler):
    freed = FreedMemory(torch.device("cpu"))
    assert len(no_compiler) == 1
    assert re.match("freed memory goes back to the system at once: .*compiler", freed.note)
    freed.hold(10**9, [])  # nothing to hold it with
    freed.close()


def test_where_it_cannot_go_back_that_is_said(no_compiler, monkeypatch):
    monkeypatch.setattr(freed_memory, "give_back_freed_memory", lambda: False)
    assert re.match("freed memory stays in the process: .*compiler", FreedMemory(torch.device("cpu")).note)


def test_plans_say_that_there_is_no_pool(no_compiler, tmp_path):
    model = torch.nn.Linear(4, 4)
    step = BudgetedStep(model, [], 2**30, parse_host(f"disk:{tmp_path}", "cpu"))
    shape = step.plan(lambda part: model(part).sum(), torch.randn(2, 4))
    step.remove()
    assert "freed memory goes back" in str(shape)


def test_a_compiler_that_fails_is_quoted(no_compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    pool = MemoryPool()
    assert not pool.install()
    assert "false" in pool.why_not
    assert not list((tmp_path / "retime").iterdir())
