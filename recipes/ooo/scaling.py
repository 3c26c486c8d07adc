"""Figure 10 of out-of-order backprop, simulated: throughput over the number of GPUs in the paper's clusters."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from retime.foundations.measure import spread
from retime.recipes.core import charts, results
from retime.recipes.core.build import build
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.recipe import Measured, SimulatedRecipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo import claims
from retime.recipes.ooo.calibration import CalibratedSimulator, calibrate, read_runs
from retime.recipes.ooo.clusters import P100_SXM2, SETTINGS, V100
from retime.recipes.ooo.discussion import discussed, network_share
from retime.recipes.ooo.model_costs import Gpu, Operations, compute_ms, count, layer_costs
from retime.recipes.ooo.settings import SimulatedSettings
from retime.schedules.systems import (
    BASELINE_OF,
    BYTEPS,
    DDP,
    HEADINGS,
    OURS,
    OURS_DDP,
    OURS_PRIORITY,
    PRIORITY,
    Sizes,
    run,
)

PAPERS_NETWORK, CALIBRATED = "section 8.3", "calibrated"
OVER = {OURS: "over BytePS in the order made", OURS_PRIORITY: "over BytePS with ideal priorities"}
"""Reverse first-k on either of them, over the same without."""
_CHECKED_BATCH = 64


class Scaling(SimulatedRecipe[SimulatedSettings]):
    """A point a cluster, network model and neural network; a quantity a number of GPUs."""

    over = (("network", "networks"), ("cluster", "clusters"), ("model", "models"))

    def __init__(self) -> None:
        self._operations: dict[str, list[Operations]] = {}
        self._shares: dict[str, float] = {}
        self._calibration: CalibratedSimulator | None = None
        self._efficiency: float | None = None

    def points(self, settings: SimulatedSettings) -> list[dict[str, Any]]:
        for name, known in (("clusters", list(SETTINGS)), ("networks", [PAPERS_NETWORK, CALIBRATED])):
            unknown = sorted(set(getattr(settings, name)) - set(known))
            if unknown:
                raise ValueError(f"{name}={unknown}: there are {', '.join(known)}")
        measured = Path(settings.calibration).exists()
        return [at for at in super().points(settings) if at["network"] != CALIBRATED or measured]

    def measure(self, settings: SimulatedSettings, at: dict[str, Any], tick: Tick) -> Measured:
        share = self._share(settings, at["network"])
        assert self._efficiency is not None
        setting = SETTINGS[at["cluster"]].with_efficiency(self._efficiency)
        batch_size = setting.batch_sizes.get(at["model"], setting.batch_size)
        costs = layer_costs(self._count(settings, at["model"]), setting.gpu, batch_size)
        sizes = Sizes(settings.partition_bytes, settings.bucket_bytes)
        rows, best = [], {}
        for system in HEADINGS:
            for devices in setting.devices:
                cluster = setting.cluster(devices, share, settings.latency_ms)
                k, timeline = run(system, costs, cluster, sizes)
                images = 1e3 * devices * batch_size / timeline.step_ms
                rows.append(Row(system, _quantity(devices), "images/s", [images]))
                if system in BASELINE_OF:
                    best[f"{system}, {devices}"] = k
            tick(system)
        facts: dict[str, Any] = {
            "batch size per GPU": batch_size,
            "layers": len(costs),
            "gradient MB": round(sum(cost.size_bytes for cost in costs) / 1e6, 1),
            "computation (ms)": round(compute_ms(costs), 2),
            "network Gbit/s": round(setting.bits_per_s * share / 1e9, 3),
            "best k": best,
            "devices": list(setting.devices),
        }
        if at["model"] in ("ResNet-50", "ResNet-152"):
            facts["images/s on a P100 SXM2"] = self._check(settings, at["model"])
        if self._calibration is not None and at["network"] == CALIBRATED:
            facts["calibration"] = _facts(self._calibration)
        return Measured(rows, facts)

    def blocks(self, settings: SimulatedSettings) -> int | None:
        return len(HEADINGS)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for ours, over in OVER.items():
            for (cluster, model, devices), claim in claims.scaling().items():
                for point in _points(result, cluster=cluster, model=model):
                    note = f"simulated, {over}, network as in {point.at['network']}"
                    lines.append(Comparison(claim, spread([_gain(point, devices, ours)]), note))
        for family in ("DenseNet", "MobileNet"):
            claim = claims.claim(f"small-{family.lower()}")
            for network, ours in product(dict.fromkeys(point.at["network"] for point in result.points), OVER):
                gains = [
                    (_gain(point, devices, ours), f"{point.at['model']} on {devices} GPUs of {point.at['cluster']}")
                    for point in _points(result, network=network)
                    if str(point.at["model"]).startswith(family)
                    for devices in point.facts["devices"]
                ]
                if gains:
                    gain, where = max(gains)
                    note = f"simulated, {where}, {OVER[ours]}, network as in {network}"
                    lines.append(Comparison(claim, spread([gain]), note))
        return lines + _checks(result)

    def notes(self, result: Result) -> list[str]:
        settings = result.points[0].settings
        lines = [
            "Counted, not measured: MACs, tensor sizes and parameters of each layer. A kernel takes its arithmetic or "
            "its memory traffic at one share of the GPU's data sheet, at which ResNet-50 takes the "
            f"{settings['compute_ms']:g} ms of section 8.3 on a {V100.name}; the P100 rows above check it on others' "
            "numbers. Where the paper gives no batch size: 64 on Titan XP and P100, 96 on V100.",
            f"Network as in {PAPERS_NETWORK}: in all clusters the share of its data sheet at which BytePS has the "
            f"{settings['overhead_ms']:g} ms of overhead that the paper states for ResNet-50 on 16 V100.",
        ]
        calibration = next((p.facts["calibration"] for p in result.points if "calibration" in p.facts), None)
        if calibration is None:
            lines.append(
                f"Not calibrated on measured runs: there was no {settings['calibration']}. Measure it with "
                "`experiment=ooo_fig10 hardware=emulated record=true` and run this again, or name another result with "
                "calibration=<path>."
            )
        else:
            lines.append(
                f"Calibrated on {calibration['runs']} measured runs: an all-reduce gets "
                f"{amount(100 * calibration['share'], '%')} of a link, a message takes "
                f"{amount(calibration['latency_ms'], 'ms')}, computation loses "
                f"{amount(100 * calibration['interference'], '%')} of its speed while the link is busy (on the ranks' "
                "own processors; not on GPUs). Each run predicted from the others alone: error "
                f"{amount(100 * calibration['mean_error'], '%')} on average, "
                f"{amount(100 * calibration['worst_error'], '%')} at worst. The clusters take over the link's share."
            )
        for network in dict.fromkeys(point.at["network"] for point in result.points):
            for ours, over in OVER.items():
                gains = [_gain(point, point.facts["devices"][-1], ours) for point in _points(result, network=network)]
                lines.append(
                    f"Network as in {network}: with all GPUs of a cluster reverse first-k gains "
                    f"{amount(min(gains), 'x')} to {amount(max(gains), 'x')} {over}, depending on cluster and model."
                )
        lines.append(
            "Reverse first-k gains over a network that sends in the order made. Over ideal priorities it gains only "
            "where the network idles: one that is always busy with the most urgent gradient needs no other order."
        )
        lines.append(
            "DenseNet and MobileNet are bound by issuing kernels (section 2), which a roofline does not know: their "
            "computation is too short here, so communication weighs more than in the paper and the gain is too large."
        )
        return lines

    def show(self, result: Result, console: Console) -> None:
        """Print the gains with as many GPUs as the cluster has, then what every recipe prints."""
        heading = ("network", "cluster", "model", "GPUs", "BytePS", "reverse first-k", *OVER.values())
        table = Table(*heading, title=result.title)
        for point in result.points:
            devices = point.facts["devices"][-1]
            images = [amount(point.values(name, _quantity(devices))[0], "images/s") for name in (BYTEPS, OURS)]
            gains = [amount(_gain(point, devices, ours), "x") for ours in OVER]
            table.add_row(*map(str, point.at.values()), str(devices), *images, *gains)
        console.print(table)
        summary = dataclasses.replace(result, points=[])
        results.show(summary, self.quantity, self.compare(result), self.notes(result), self.references, console)

    def draw(self, result: Result, path: Path) -> None:
        network = result.points[0].at["network"]
        points = _points(result, network=network)
        clusters = list(dict.fromkeys(point.at["cluster"] for point in points))
        drawing, panels = charts.panels(
            f"{result.title}\nnetwork as in {network}; solid: {OVER[OURS]}, dashed: {OVER[OURS_PRIORITY]}",
            max(2, len(clusters)),
            width=10.7,
            height=5.4,
        )
        for axes, cluster in zip(panels, clusters, strict=False):
            for index, point in enumerate(_points(result, network=network, cluster=cluster)):
                devices = point.facts["devices"]
                colour = charts.COLOURS[index % len(charts.COLOURS)]
                for style, ours, label in (("o-", OURS, point.at["model"]), (".--", OURS_PRIORITY, "_nolegend_")):
                    gains = [_gain(point, number, ours) for number in devices]
                    axes.plot(devices, gains, style, color=colour, label=label, markersize=4, linewidth=1.2)
                for (place, model, number), claim in claims.scaling().items():
                    if (place, model) == (cluster, point.at["model"]):
                        axes.plot([number], [claim.value], "*", color=colour, markersize=13, markerfacecolor="white")
            charts.even_line(axes, "the same without reordering")
            axes.set_title(f"{cluster}: {SETTINGS[cluster].gpu.name}", fontsize=10)
            charts.whole_ticks(axes, "GPUs")
        panels[0].set_ylabel("throughput of reverse first-k over BytePS (x)")
        charts.legend_below(drawing, panels[0], 7, title="stars: the paper, over BytePS", title_fontsize=8)
        charts.save(drawing, path)
        _draw_throughput(points, clusters, result, path.with_name("throughput.png"))

    def _share(self, settings: SimulatedSettings, network: str) -> float:
        if self._efficiency is None:
            costs, setting = discussed(settings)
            self._efficiency = setting.gpu.efficiency
            self._shares[PAPERS_NETWORK] = network_share(settings, costs, setting)
        if network == CALIBRATED and CALIBRATED not in self._shares:
            self._calibration = calibrate(read_runs(Path(settings.calibration)))
            self._shares[CALIBRATED] = self._calibration.parameters.share
        return self._shares[network]

    def _count(self, settings: SimulatedSettings, model: str) -> list[Operations]:
        if model not in self._operations:
            block = settings.models[model]
            self._operations[model] = count(lambda: build(block), settings.image_size)
        return self._operations[model]

    def _check(self, settings: SimulatedSettings, model: str) -> float:
        gpu = P100_SXM2
        assert self._efficiency is not None
        known = Gpu(gpu.name, gpu.operations_per_s, gpu.memory_bytes_per_s, self._efficiency)
        step_ms = compute_ms(layer_costs(self._count(settings, model), known, _CHECKED_BATCH))
        return round(1e3 * _CHECKED_BATCH / step_ms, 1)


def _quantity(devices: int) -> str:
    return f"{devices} GPU" if devices == 1 else f"{devices} GPUs"


def _gain(point: Point, devices: int, ours: str) -> float:
    """Reverse first-k over the BytePS that it runs on."""
    quantity = _quantity(devices)
    return point.values(ours, quantity)[0] / point.values(BASELINE_OF[ours], quantity)[0]


def _points(result: Result, **at: str) -> list[Point]:
    return [point for point in result.points if all(point.at[key] == value for key, value in at.items())]


def _checks(result: Result) -> list[Comparison]:
    lines = []
    for model in ("ResNet-50", "ResNet-152"):
        checked = [point for point in _points(result, model=model) if "images/s on a P100 SXM2" in point.facts]
        if checked:
            value = spread([checked[0].facts["images/s on a P100 SXM2"]])
            claim = claims.claim(f"p100-{model.lower()}")
            lines.append(Comparison(claim, value, "roofline calibrated on V100, ResNet-50"))
    return lines


def _facts(calibration: CalibratedSimulator) -> dict[str, Any]:
    return {
        "runs": len(calibration.measured_ms),
        "share": round(calibration.parameters.share, 4),
        "latency_ms": round(calibration.parameters.latency_ms, 4),
        "interference": round(calibration.parameters.interference, 4),
        "mean_error": round(calibration.mean_error, 4),
        "worst_error": round(calibration.worst_error, 4),
        "errors": {name: round(error, 4) for name, error in calibration.errors.items()},
    }


def _draw_throughput(points: list[Point], clusters: list[str], result: Result, path: Path) -> None:
    """The figure as the paper draws it: images a second of the first two networks."""
    drawing, panels = charts.panels(result.title, max(2, len(clusters)), width=13, height=5.4)
    for axes, cluster in zip(panels, clusters, strict=False):
        shown = [point for point in points if point.at["cluster"] == cluster][:2]
        for style, point in zip(("-", "--"), shown, strict=False):
            devices = point.facts["devices"]
            for index, system in enumerate((DDP, BYTEPS, PRIORITY, OURS, OURS_DDP)):
                images = [point.values(system, _quantity(number))[0] for number in devices]
                label = f"{point.at['model']}, {HEADINGS[system]}"
                axes.plot(devices, images, "o" + style, color=charts.COLOURS[index], label=label, markersize=3)
        axes.set_title(f"{cluster}: {SETTINGS[cluster].gpu.name}", fontsize=10)
        charts.whole_ticks(axes, "GPUs")
    panels[0].set_ylabel("images/s")
    charts.legend_below(drawing, panels[0], 2)
    charts.save(drawing, path)
