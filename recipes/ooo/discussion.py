"""Section 8.3's discussion: ResNet-50 on 16 V100, where reverse first-45 leaves 200 of 350 ms of communication."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.build import build
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.recipe import Measured, SimulatedRecipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo import claims
from retime.recipes.ooo.clusters import SETTINGS, Setting
from retime.recipes.ooo.model_costs import calibrated, compute_ms, count, layer_costs
from retime.recipes.ooo.settings import SimulatedSettings
from retime.schedules import LayerCost
from retime.schedules.systems import BYTEPS, HEADINGS, OURS, OURS_PRIORITY, PRIORITY, Sizes, run

K45 = "reverse first-45 on BytePS"
_DEVICES, _CLUSTER = 16, "Pub-A"


class Discussion(SimulatedRecipe[SimulatedSettings]):
    """Two numbers of the text are given to the simulator, computation and baseline's overhead; the others come out."""

    def measure(self, settings: SimulatedSettings, at: dict[str, Any], tick: Tick) -> Measured:
        costs, setting = discussed(settings)
        share = network_share(settings, costs, setting)
        cluster = setting.cluster(_DEVICES, share, settings.latency_ms)
        sizes = Sizes(settings.partition_bytes, settings.bucket_bytes)
        k = 45
        found = {
            HEADINGS[BYTEPS]: run(BYTEPS, costs, cluster, sizes),
            K45: run(OURS, costs, cluster, sizes, k),
            f"{HEADINGS[OURS]}, best k": run(OURS, costs, cluster, sizes),
            HEADINGS[PRIORITY]: run(PRIORITY, costs, cluster, sizes),
            f"{HEADINGS[OURS_PRIORITY]}, best k": run(OURS_PRIORITY, costs, cluster, sizes),
        }
        rows = []
        for name, (_, timeline) in found.items():
            rows.append(Row(name, "step", "ms", [timeline.step_ms]))
            rows.append(Row(name, "computation", "ms", [timeline.compute_ms]))
            rows.append(Row(name, "communication overhead", "ms", [timeline.idle_ms]))
        deferred_ms = sum(cost.weight_gradient_ms for cost in costs[1:k])
        facts = {
            "layers": len(costs),
            "gradient MB": round(sum(cost.size_bytes for cost in costs) / 1e6, 1),
            "GPU efficiency": round(setting.gpu.efficiency, 3),
            "network Gbit/s": round(cluster.between_nodes.bits_per_s / 1e9, 3),
            "best k": {name: k for name, (k, _) in found.items() if "best" in name},
            "W2 to W45 (ms)": round(deferred_ms, 2),
        }
        return Measured(rows, facts)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over BytePS in the order made": HEADINGS[BYTEPS]}

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        overhead = {name: point.values(name, "communication overhead")[0] for name in point.variants("step")}
        base, ours = HEADINGS[BYTEPS], K45
        deferred_ms = point.facts["W2 to W45 (ms)"]
        further_ms = overhead[base] - overhead[ours] - deferred_ms
        speed = point.values(base, "step")[0] / point.values(ours, "step")[0]
        values = {
            "compute": (point.values(base, "computation")[0], "given"),
            "overhead": (overhead[base], "given"),
            "discussion-deferred": (deferred_ms, "simulated"),
            "discussion-further": (further_ms, "simulated: what remains of the gain"),
            "discussion-remaining": (overhead[ours], "simulated"),
            "discussion-speedup": (speed, "simulated"),
        }
        return [Comparison(claims.claim(name), spread([value]), note) for name, (value, note) in values.items()]

    def notes(self, result: Result) -> list[str]:
        (point,) = result.points
        facts = point.facts
        best = ", ".join(f"k = {k} ({name})" for name, k in facts["best k"].items())
        ideal = point.values(HEADINGS[PRIORITY], "communication overhead")[0]
        return [
            "Assumed: a layer's kernels take their arithmetic or their memory traffic at one efficiency, "
            f"{facts['GPU efficiency']}, at which a step of the network takes the stated time; gradients are added up "
            "over NVLink and then over 4 nodes, in partitions of BytePS's default size, in the order made; the network "
            f"carries {facts['network Gbit/s']} Gbit/s of its 10, at which the baseline's overhead is the stated one.",
            "The text has layer 1 wait 350 ms although its gradient is under 40 kB and BytePS sends urgent partitions "
            f"first. With ideal priorities at the same bandwidth the simulated overhead is {amount(ideal, 'ms')}, and "
            "reverse first-k then gains nothing as long as the network, always busy, is the bottleneck. The paper's "
            "numbers fit a network that works off its backlog in order.",
            f"Best k of the simulation: {best}.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        drawing, axes = charts.figure(result.title, width=9.5)
        names = point.variants("step")
        parts = ("computation", "communication overhead")
        bars = {name: {part: point.values(name, part)[0] for part in parts} for name in names}
        for name, second in (("BytePS", "overhead"), ("reverse first-45", "discussion-remaining")):
            numbers = [claims.claim(claim).value for claim in ("compute", second)]
            bars[f"{name} (paper)"] = dict(zip(parts, numbers, strict=True))
        totals = {name: spread([sum(bar.values())]) for name, bar in bars.items()}
        charts.stacked_bars(axes, bars, "one training step (ms)", totals)
        charts.save(drawing, path)


def discussed(settings: SimulatedSettings) -> tuple[list[LayerCost], Setting]:
    """The discussed network's layers on the discussed GPU, at the efficiency that the stated computation time gives."""
    setting = SETTINGS[_CLUSTER]
    operations = count(lambda: build(settings.model), settings.image_size)
    gpu = calibrated(setting.gpu, operations, settings.batch_size, settings.compute_ms)
    costs = layer_costs(operations, gpu, settings.batch_size)
    assert abs(compute_ms(costs) - settings.compute_ms) < 1e-6 * settings.compute_ms
    return costs, setting.with_efficiency(gpu.efficiency)


def network_share(settings: SimulatedSettings, costs: Sequence[LayerCost], setting: Setting) -> float:
    """The share of the network's data sheet at which the baseline's communication overhead is the stated one.

    Raises:
        ValueError: no share gives it.
    """
    sizes = Sizes(settings.partition_bytes, settings.bucket_bytes)

    def overhead_ms(share: float) -> float:
        return run(BYTEPS, costs, setting.cluster(_DEVICES, share, settings.latency_ms), sizes)[1].idle_ms

    low, high = 0.01, 1.0  # more of the network, less overhead
    if not overhead_ms(high) <= settings.overhead_ms <= overhead_ms(low):
        raise ValueError(
            f"overhead_ms={settings.overhead_ms}: this network and batch size can have {overhead_ms(high):.0f} to "
            f"{overhead_ms(low):.0f} ms; give a number between"
        )
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if overhead_ms(middle) > settings.overhead_ms else (low, middle)
    return high
