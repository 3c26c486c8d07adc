"""Every address that the Triton kernels read or write lies in one of their tensors, in Triton's interpreter.

There an address is a number. triton-viz 3.0 has a sanitizer for this, which is of no use for these kernels: it takes a
pointer that a loop advances for as many steps too far as the loop has turns.

The first test runs the others in a process of their own, wherever triton is installed.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retime.mechanisms.scan import triton_launch

INTERPRETED = "TRITON_INTERPRET" in os.environ
LENGTH = 3
needs_triton = pytest.mark.skipif(not triton_launch.has_triton(), reason="triton is not installed")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, by the first test of this file")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_addresses_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    if "only 0-dimensional arrays" in done.stdout:
        pytest.skip("this version of Triton's interpreter does not go with this version of NumPy")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "12 passed, 1 skipped" in done.stdout


class CheckedMemory:
    """What the interpreter reads and writes memory with: refuses what is in no tensor of the launch."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._bounds: list[tuple[int, int]] = []
        self.accesses = 0

    def begin(self, arguments: Any) -> None:
        self._bounds = []
        for one in arguments:
            if isinstance(one, Tensor):
                last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
                self._bounds.append((one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size()))

    def _check(self, addresses: Any, mask: Any) -> None:
        used = np.asarray(addresses)[np.broadcast_to(mask, np.shape(addresses))]
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in self._bounds:
            inside |= (used >= first) & (used < end)
        assert inside.all(), "an address outside of all tensors"
        self.accesses += used.size

    def load(self, addresses: Any, mask: Any, *more: Any) -> Any:
        self._check(addresses, mask)
        return self._memory.load(addresses, mask, *more)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check(addresses, mask)
        return self._memory.store(addresses, values, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CheckedMemory:
    from triton.runtime import interpreter

    checked, plain = CheckedMemory(interpreter._interpreter), interpreter.GridExecutor._init_args_hst

    def begin(executor: Any, arguments: Any, options: Any) -> Any:
        checked.begin(arguments)
        return plain(executor, arguments, options)

    monkeypatch.setattr(interpreter, "_interpreter", checked)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", begin)
    return checked


def arguments(blocks: int, hidden: int, steps: int, batch: int) -> dict[str, Tensor]:
    """Return what a launch takes; blocks are outermost in memory, as the GRU makes them."""
    scale = torch.rand(blocks, steps, batch, hidden).movedim(0, -2)
    matrix = torch.randn(blocks * hidden, hidden) / hidden
    return {"scale": scale, "matrix": matrix, "gradient": torch.randn(steps, batch, hidden)}


@needs_triton
@in_interpreter
@pytest.mark.parametrize("steps", [1, 2 * LENGTH, 2 * LENGTH + 1])
@pytest.mark.parametrize(("blocks", "hidden", "batch"), [(1, 8, 1), (4, 20, 2), (1, 33, 3)])
def test_every_address_is_inside(blocks: int, hidden: int, batch: int, steps: int, memory: CheckedMemory) -> None:
    v, carry = triton_launch.scan_chunks(**arguments(blocks, hidden, steps, batch), length=min(LENGTH, steps))
    assert memory.accesses >= blocks * hidden * hidden + 3 * v.numel() + carry.numel()


@needs_triton
@in_interpreter
@pytest.mark.parametrize("short", ["matrix", "gradient", "scale"])
def test_an_address_behind_a_tensor_is_seen(short: str, memory: CheckedMemory) -> None:
    from triton.runtime.errors import InterpreterError

    tensors = arguments(1, 8, 7, 1)
    if short == "scale":  # of which the launch takes the number of steps, so a chunk begins behind the gradient's end
        tensors["scale"] = torch.rand(8, 1, 1, 8)
    else:
        tensors[short] = tensors[short][:-1].clone()
    with pytest.raises(InterpreterError, match="an address outside of all tensors"):
        triton_launch.scan_chunks(**tensors, length=LENGTH)
