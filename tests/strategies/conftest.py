"""Fits of one test leave no process group to the next."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
