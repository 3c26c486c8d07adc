"""What Accelerate keeps for a process, its device and mixed precision among it, is that of one test."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    state = pytest.importorskip("accelerate.state", reason="needs the extra lightning-retime[accelerate]")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    state.PartialState._reset_state()
