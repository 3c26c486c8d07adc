"""Figure 11 of out-of-order backprop on real ranks whose layers sleep: messages over links that are shaped."""

from __future__ import annotations

from retime.foundations.measure import speedup
from retime.recipes.core.claims import Comparison
from retime.recipes.core.results import Result
from retime.recipes.ooo.claims import pipelines
from retime.recipes.ooo.pipeline import STEP, PipelineTargets, worst_error
from retime.recipes.ooo.pipeline_scaling import ONE, OURS


class PipelineLinks(PipelineTargets):
    """A point a network."""

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        points = {point.at["case"]: point for point in result.points}
        for (case, name, peer), claim in pipelines("Figure 11, simulated").items():
            point = points.get(case)
            if point is None or peer == ONE or not (point.has(name, STEP) and point.has(peer, STEP)):
                continue
            planned = point.facts["simulated ms"][peer] / point.facts["simulated ms"][name]
            ours = speedup(point.values(peer, STEP), point.values(OURS, STEP))
            note = f"{case}, emulated compute: {name} over {peer}; simulated {planned:.2f}; {OURS} {ours.median:.2f}"
            lines.append(Comparison(claim, speedup(point.values(peer, STEP), point.values(name, STEP)), note))
        return [*lines, *map(worst_error, points.values())]
