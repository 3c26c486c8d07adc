"""What a pipeline did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from retime.foundations.byte_sizes import show_bytes
from retime.foundations.reasons import because
from retime.mechanisms.pipeline.plan import PipelinePlan
from retime.mechanisms.pipeline.stage import Span, Stage

__all__ = ["PipelineReport"]


@dataclass
class PipelineReport:
    """Of this rank; empty before the first step.

    Attributes:
        schedule: its name.
        layers: the list that the model was cut in.
        stages: of all ranks together.
        stages_here: the stages of this rank, from 0.
        micro_batches: of the last step.
        steps_by_micro_batches: how many steps had so many.
        steps: that ran so far.
        parameter_bytes: of the parameters on this rank.
        parameter_bytes_by_rank: on each rank of the pipeline; of weights that several use, on each of them.
        parameter_bytes_of_all: of all parameters.
        bubble_share: the share of the last step, from its first to its last task on this rank, without a task.
        simulated_bubble_share: what the simulation said for this rank; None for schedules of torch's own.
        layers_in_order: layers whose weight gradients do not wait, by reason.
        spans: the tasks of the last step on this rank.
    """

    schedule: str = ""
    layers: str = ""
    stages: int = 0
    stages_here: tuple[int, ...] = ()
    micro_batches: int = 0
    steps_by_micro_batches: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    parameter_bytes: int = 0
    parameter_bytes_by_rank: tuple[int, ...] = ()
    parameter_bytes_of_all: int = 0
    bubble_share: float = 0.0
    simulated_bubble_share: float | None = None
    layers_in_order: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def note(self, stages: Sequence[Stage], plan: PipelinePlan, rank: int) -> None:
        """One more step has run on this rank."""
        self.steps += 1
        self.micro_batches = plan.micro_batches
        self.steps_by_micro_batches[plan.micro_batches] = self.steps_by_micro_batches.get(plan.micro_batches, 0) + 1
        self.simulated_bubble_share = plan.bubble_share[rank] if plan.bubble_share else None
        self.spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: span.start_s)
        whole = max(span.end_s for span in self.spans) - self.spans[0].start_s
        busy = sum(span.end_s - span.start_s for span in self.spans)
        self.bubble_share = max(0.0, 1 - busy / whole) if whole else 0.0

    def __str__(self) -> str:
        if not self.stages:
            return "pipeline: no step yet"
        plural = "s" if len(self.stages_here) > 1 else ""
        here = ", ".join(str(stage + 1) for stage in self.stages_here)
        steps = self.steps_by_micro_batches
        usual, *others = sorted(steps, key=lambda count: (-steps[count], count)) or [0]
        rest = f" ({', '.join(f'{steps[count]} of {count}' for count in others)})" if others else ""
        simulated = "" if self.simulated_bubble_share is None else f" (simulated {self.simulated_bubble_share:.0%})"
        text = (
            f"pipeline: {self.steps} steps of {usual} micro-batches{rest} by {self.schedule} through "
            f"{self.stages} stages of {repr(self.layers) if self.layers else 'the model'}; this rank has stage{plural} "
            f"{here} with {show_bytes(self.parameter_bytes)} of {show_bytes(self.parameter_bytes_of_all)} of "
            f"parameters (by rank {', '.join(map(show_bytes, self.parameter_bytes_by_rank))}), "
            f"{self.bubble_share:.0%} of the last step without a task{simulated}"
        )
        if self.layers_in_order:
            text += f"; weight gradients in order: {because(self.layers_in_order, 'layers')}"
        return text
