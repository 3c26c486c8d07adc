"""`ooo_fig10`, the measured part of Figure 10: throughput over hosts, real computation and sleeping layers.

Up to as many hosts as this machine has cores compute for real; beyond that, and for comparison below it, the layers
sleep for the times measured on a real rank. The simulated part of the figure is calibrated on these points.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, show
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, ratio, titled
from retime.recipes.ooo.claims import claim
from retime.recipes.ooo.cluster import OnRanks, best_of_ours, bound_ms, bound_notes
from retime.recipes.ooo.settings import OutOfOrderSettings
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, label

REAL, EMULATED = "real", "emulated"


class Hosts(OnRanks):
    """One point for each number of hosts and kind of computation."""

    axes = ("host_counts",)

    def __init__(self) -> None:
        self._known_costs: dict[int, dict[str, Any]] = {}

    def points(self, settings: OutOfOrderSettings) -> list[dict[str, Any]]:
        cores = len(os.sched_getaffinity(0))
        real = [count for count in settings.host_counts if count <= cores]
        found = [{"hosts": count, "compute": REAL} for count in real]
        if settings.emulate_compute:
            found += [{"hosts": count, "compute": EMULATED} for count in settings.host_counts]
        elif len(real) < len(settings.host_counts):
            raise ValueError(
                f"host_counts has more hosts than this machine has cores ({cores}): set emulate_compute=true"
            )
        return found

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        hosts = at["hosts"]
        costs = self._costs(settings, min(hosts, len(os.sched_getaffinity(0))), tick)
        sleeping = costs["layers"] if at["compute"] == EMULATED else None
        names = [name for name in settings.variants if hosts > 1 or name.startswith("ddp")]
        measured = self.compare_variants(replace(settings, hosts=hosts, variants=names), tick, sleeping=sleeping)
        measured.facts["layers"] = costs["layers"]
        measured.facts["cluster"]["update_ms"] = costs["update_ms"]
        return measured

    def _costs(self, settings: OutOfOrderSettings, busy: int, tick: Tick) -> dict[str, Any]:
        """The layers' times, with as many ranks at work at the same time as the cores will be shared by later."""
        if busy not in self._known_costs:
            with self.network(settings, busy, settings.rate) as network:
                self._known_costs[busy] = self.run_job(settings, network, tick, "layers")[0]
        return self._known_costs[busy]

    def compare(self, result: Result) -> list[Comparison]:
        ratios = []
        for point in result.points:
            if point.at["compute"] == REAL and point.has("priority", "step"):
                ours = best_of_ours(point)
                over = ratio(point, "priority", ours) if ours else None
                ratios.append((over, f"{point.at['hosts']} hosts, over a peer that sends by priority"))
        lines = ratios or [(None, "no peer here sends by priority, as BytePS does")]
        return [Comparison(claim(f"hosts-{part}"), over, note) for part in "abc" for over, note in lines]

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in sorted(result.points, key=_order):
            lines += bound_notes(point, f"{point.at['compute']} computation")
            ours, peers = best_of_ours(point), ("ddp", "ddp_layer_buckets", "ddp_tuned_buckets", "priority", "ooo_k0")
            over = {label(name): ratio(point, name, ours) for name in peers if ours}
            gains = [f"{show(gain, 'x')} over {name}" for name, gain in over.items() if gain]
            if gains:
                where = f"{point.at['compute']} computation, {point.at['hosts']} hosts"
                lines.append(f"- {where}: reverse-first-k, k tuned, is {', '.join(gains)}")
        real = {point.at["hosts"]: point for point in result.points if point.at["compute"] == REAL}
        for point in result.points:
            twin = real.get(point.at["hosts"])
            if point.at["compute"] == EMULATED and twin:
                found = spread(point.values("ddp", "step")).median / spread(twin.values("ddp", "step")).median
                lines.append(f"- sleeping layers take {found:.2f} of the real ddp's step on {point.at['hosts']} hosts")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        kinds = [kind for kind in (REAL, EMULATED) if any(point.at["compute"] == kind for point in result.points)]
        drawing, panels = charts.one_or_panels(titled(result), len(kinds), sharey=True)
        for axes, kind in zip(panels, kinds, strict=True):
            points = sorted((point for point in result.points if point.at["compute"] == kind), key=_order)
            names = dict.fromkeys(
                name for point in points for name in point.variants("step") if name not in (COMPUTE, COMMUNICATION)
            )
            for index, name in enumerate(names):
                known = [point for point in points if point.has(name, "step")]
                hosts = [point.at["hosts"] for point in known]
                speeds = [throughput(point, point.values(name, "step")) for point in known]
                charts.points_with_spread(axes, hosts, speeds, label(name), index, line=True)
            bounds = [throughput(point, bound_ms(point)).median for point in points]
            axes.plot([point.at["hosts"] for point in points], bounds, "--", color=charts.GREY, label="bound")
            axes.set_title(f"{kind} computation", fontsize=10)
            axes.set_xlabel("hosts")
            axes.set_xticks([point.at["hosts"] for point in points])
        panels[0].set_ylim(bottom=0)  # after all is drawn: the panels share their scale
        panels[0].set_ylabel("samples per second, all hosts")
        panels[-1].legend(fontsize=8)
        charts.save(drawing, path)


def throughput(point: Point, step_ms: list[float]) -> Spread:
    """Samples per second of all hosts together."""
    samples = 1e3 * point.facts["cluster"]["batch_size"] * point.facts["cluster"]["hosts"]
    return spread([samples / value for value in step_ms])


def _order(point: Point) -> tuple[str, int]:
    return (point.at["compute"], point.at["hosts"])
