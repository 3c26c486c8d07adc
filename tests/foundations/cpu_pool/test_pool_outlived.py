"""Blocks of oneDNN, which frees them through whatever allocator is there by then, outlive the pool's use."""

from __future__ import annotations

import pytest

from retime.foundations.cpu_pool.pool import pool_library
from retime.foundations.native import NoLibraryError
from support.warm_start import run_program

_PROGRAM = """
import torch
from retime.foundations.cpu_pool.pool import MemoryPool
pool = MemoryPool()
assert pool.install()
pool.limit(2**30)
block = torch.rand(512, 512).to_mkldnn()
pool.remove()
del block
print("freed")
"""


def test_a_block_that_is_freed_after_the_pool_has_gone() -> None:
    if isinstance(pool_library(), NoLibraryError):
        pytest.skip(f"no pool: {pool_library()}")
    assert run_program(_PROGRAM) == "freed\n"
