"""What the timing of a step has to look like, in bare loops and in fits."""

from collections import Counter
from itertools import pairwise

from retime.foundations.measure.timing import StepTiming


def count(timing: StepTiming) -> dict[str, int]:
    """Spans by their names."""
    return dict(Counter(span.name for span in timing.spans))


def assert_consistent(timing: StepTiming) -> None:
    step = [span for span in timing.spans if span.lane == "step"]
    assert all(span.duration_ms >= 0 for span in timing.spans)
    assert all(a.end_ms <= b.start_ms + 1e-6 for a, b in pairwise(step))
    assert timing.forward_ms + timing.backward_ms + timing.update_ms <= timing.step_ms + 1e-6
    assert 0 <= timing.communication_exposed_ms <= timing.backward_ms
