"""Figure 11 of out-of-order backprop on real ranks whose layers sleep: messages over links that are shaped."""

from __future__ import annotations

from retime.recipes.core.claims import Comparison
from retime.recipes.core.measure import speedup, spread
from retime.recipes.core.results import Result
from retime.recipes.ooo.pipeline import SIMULATED, STEP, PipelineTargets, error_percent
from retime.recipes.ooo.pipeline_scaling import CLAIMS, ONE, OURS

__all__ = ["PipelineLinks"]


class PipelineLinks(PipelineTargets):
    """A point a network."""

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        points = {point.at["case"]: point for point in result.points}
        for (case, name, peer), claim in CLAIMS["Figure 11, simulated"].items():
            point = points.get(case)
            if point is None or peer == ONE or not (point.has(name, STEP) and point.has(peer, STEP)):
                continue
            planned = point.facts["simulated ms"][peer] / point.facts["simulated ms"][name]
            ours = speedup(point.values(peer, STEP), point.values(OURS, STEP))
            note = f"{case}, emulated compute: {name} over {peer}; simulated {planned:.2f}; {OURS} {ours.median:.2f}"
            lines.append(Comparison(claim, speedup(point.values(peer, STEP), point.values(name, STEP)), note))
        for case, point in points.items():
            worst = max(point.variants(STEP), key=lambda schedule: abs(error_percent(point, schedule).median))
            apart = spread([abs(value) for value in error_percent(point, worst).rounds])
            lines.append(Comparison(SIMULATED, apart, f"{case}, emulated compute: {worst}"))
        return lines
