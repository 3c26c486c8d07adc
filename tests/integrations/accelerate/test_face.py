"""``retime.integrations.accelerate`` shows its objects, each from a file of its own."""

import pytest

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from retime.integrations import accelerate as face


def test_the_face_shows_the_objects_and_nothing_else() -> None:
    objects = ["CPUAccumulate", "FusedOptimizer", "MemoryBudget", "OutOfOrderDataParallel", "OutOfOrderPipeline"]
    assert face.__all__ == [*objects, "TwoStreams"]
    homes = {getattr(face, name).__module__.rpartition(".")[2] for name in face.__all__}
    assert homes == {
        *("cpu_accumulate", "fused_optimizer", "memory_budget", "ooo_pipeline", "out_of_order", "two_streams")
    }
