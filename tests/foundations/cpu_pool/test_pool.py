"""The pool of CPU tensors: bytes live, kept, mapped and reused; forks, threads, outliving tensors, no compiler."""

import gc
import os
import re
import threading
from pathlib import Path

import pytest
import torch

from retime.foundations.cpu_pool import pool as pool_module
from retime.foundations.cpu_pool.pool import POOLED_BYTES, FreedMemory, MemoryPool
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.mechanisms.memory_budget.step import BudgetedStep

PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
BLOCK = 256 * PAGE
GRANULE = 2 * 2**20


def block(size=BLOCK):
    return torch.empty(size, dtype=torch.uint8)


def all_are(tensor, value):
    return bool((tensor.numpy() == value).all())  # numpy takes no memory from the pool


class TestCounts:
    def test_small_tensors_are_not_the_pools(self, pool):
        before = pool.counts().live
        small, large = block(POOLED_BYTES - 1), block(POOLED_BYTES)  # so the threshold is the machine code's
        assert pool.counts().live - before == POOLED_BYTES
        assert pool.bytes_elsewhere([small, large, small[:5]]) == POOLED_BYTES - 1

    def test_freed_memory_is_used_again(self, pool):
        pool.limit(pool.counts().live + 4 * BLOCK)
        first = block()
        place = first.data_ptr()
        del first
        assert pool.counts().free >= BLOCK
        assert block().data_ptr() == place
        assert pool.counts().reused == BLOCK

    def test_nothing_is_kept_beyond_the_limit(self, pool):
        base = pool.counts().live
        pool.limit(base + 3 * BLOCK)
        some = [block() for _ in range(4)]  # live tensors are not limited
        assert pool.counts().live == base + 4 * BLOCK
        del some[0]
        assert pool.counts().free == 0
        del some
        assert base + pool.counts().free == base + 3 * BLOCK
        pool.limit(0)
        assert pool.counts().free == 0

    def test_held_bytes_stay_below_the_limit(self, pool):
        base = pool.counts().live
        pool.limit(base + 8 * BLOCK)
        pool.reset_peaks()
        for size in (5, 3, 7, 2, 6, 8, 1, 4):  # none fits what is kept of the one before without giving some back
            block(size * BLOCK)
        assert pool.counts().peak_reserved <= base + 8 * BLOCK
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

    def test_the_last_freed_block_of_a_size_comes_first(self, pool):
        pool.limit(pool.counts().live + 100 * BLOCK)
        first, other, second = block(), block(2 * BLOCK), block()
        places = [second.data_ptr(), first.data_ptr()]
        del first, second
        again = [block(), block()]
        assert [one.data_ptr() for one in again] == places
        del other


class TestMovedTogether:
    """Free granules that do not touch serve a larger block, neither copied nor cleared by anybody."""

    def fragmented(self, pool, count=16):
        """A limit that is used up, with every second granule free."""
        base = pool.counts().live
        pool.limit(base + count * GRANULE)
        blocks = [block(GRANULE).fill_(i) for i in range(count)]
        del blocks[::2]
        pool.reset_peaks()
        return base, blocks

    def test_no_memory_is_asked_for(self, pool):
        base, others = self.fragmented(pool)
        large = block(8 * GRANULE)
        assert pool.counts().mapped == 0
        assert pool.counts().moved == 8 * GRANULE
        assert pool.counts().peak_reserved == base + 16 * GRANULE
        assert sorted(large[::GRANULE].tolist()) == list(range(0, 16, 2))  # as they were freed
        for i, other in enumerate(others):
            assert all_are(other, 2 * i + 1)

    def test_the_rest_of_the_last_one_stays_free(self, pool):
        _, others = self.fragmented(pool)
        large = block(5 * GRANULE + 1)
        assert pool.counts().free == 3 * GRANULE - PAGE
        large.fill_(7)
        small = block(GRANULE // 2).fill_(9)
        assert all_are(large, 7)
        assert pool.counts().mapped == 0
        del others, small

    def test_what_is_missing_is_asked_for_within_the_limit(self, pool):
        base, others = self.fragmented(pool)
        pool.limit(base + 20 * GRANULE)
        large = block(11 * GRANULE + GRANULE // 2).fill_(3)
        counts = pool.counts()
        assert counts.moved == 8 * GRANULE
        assert counts.mapped == 3 * GRANULE + GRANULE // 2
        assert counts.peak_reserved <= base + 20 * GRANULE
        assert all_are(large, 3)
        del others

    def test_it_can_be_given_back_and_taken_again(self, pool):
        base, others = self.fragmented(pool)
        for size in (8, 3, 5, 8, 1, 7):
            assert all_are(block(size * GRANULE - 3 * PAGE).fill_(size), size)
        pool.limit(0)
        assert pool.counts().free == 0
        del others
        assert pool.counts().live == base


def test_memory_comes_in_huge_pages(pool):
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    pool.limit(pool.counts().live + 64 * GRANULE)
    before = huge_bytes()
    large = block(32 * GRANULE).fill_(1)
    if huge_bytes() == before:
        pytest.skip("this machine has no huge page free")
    assert huge_bytes() - before <= 32 * GRANULE
    del large


def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


class TestWishes:
    def test_a_limit_is_stronger_than_a_slack(self, pool):
        second = MemoryPool()
        second.install()
        second.follow(2.0)
        del [block()][0]
        assert pool.counts().free == 0
        pool.remove()
        del [block()][0]
        assert second.counts().free >= BLOCK
        second.remove()

    def test_what_could_not_be_had_is_not_kept(self, pool):
        pool.remove()
        pool.install()
        pool.follow(1.0)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            block(2**47 - GRANULE)
        for size in (11, 23, 47):
            block(size * GRANULE)
        counts = pool.counts()
        assert counts.live + counts.free <= counts.peak_live + 2 * GRANULE

    def test_the_last_limit_holds(self, pool):
        second = MemoryPool()
        second.install()
        second.limit(second.counts().live + 2 * BLOCK)
        del [block()][0]
        assert pool.counts().free >= BLOCK
        second.remove()
        assert pool.counts().free == 0


@pytest.mark.parametrize("size", [2**48, 2**62, 2**63 - 1])
def test_more_than_there_is_is_torchs_own_error(pool, size):
    before, kept = pool.counts().live, block()
    with pytest.raises(
        RuntimeError, match=rf"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size}"
    ):
        torch.empty(size, dtype=torch.uint8)
    assert pool.counts().live == before + BLOCK
    assert pool.bytes_elsewhere([kept, block()]) == 0


def test_values_survive_the_pool_and_the_other_way_round(pool):
    old = torch.arange(10**5)
    pool.remove()
    new = torch.arange(10**5)
    assert torch.equal(old, new)
    del old  # its memory goes back by the pool, which is no longer installed
    with pytest.raises(RuntimeError, match="install"):
        pool.counts()


def test_the_last_of_its_users_takes_it_away(pool):
    second = MemoryPool()
    second.install()
    second.install()  # twice is once
    second.remove()
    second.remove()
    assert pool.bytes_elsewhere([block()]) == 0
    pool.remove()
    others = len(pool_module._REQUESTS)  # those of earlier tests that are still alive
    between = block()
    pool.install()
    assert pool.bytes_elsewhere([between]) == (0 if others else BLOCK)
    assert pool.bytes_elsewhere([block()]) == 0


def test_one_that_was_forgotten_is_removed(pool):
    before = len(pool_module._REQUESTS)
    forgotten = MemoryPool()
    forgotten.install()
    assert len(pool_module._REQUESTS) == before + 1
    del forgotten
    gc.collect()
    assert len(pool_module._REQUESTS) == before


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


def test_without_a_compiler_freed_memory_goes_back(no_compiler):
    freed = FreedMemory(torch.device("cpu"))
    assert len(no_compiler) == 1
    assert re.match("freed memory goes back to the system at once: .*compiler", freed.note)
    freed.hold(10**9, [])  # nothing to hold it with
    freed.close()


def test_where_it_cannot_go_back_that_is_said(no_compiler, monkeypatch):
    monkeypatch.setattr(pool_module, "give_back_freed_memory", lambda: False)
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
