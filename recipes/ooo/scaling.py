"""Section 8.3 of out-of-order backprop, simulated: the discussed network on 16 V100, and Figure 10 in all clusters.

The discussion has ResNet-50 on 16 V100, where reverse first-45 leaves 200 of 350 ms of communication; what it states
sets GPUs and network for Figure 10, the throughput over the number of GPUs in the paper's clusters.
"""

import dataclasses
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.build import build
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.recipe import Measured, SimulatedRecipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo import claims, model_costs
from retime.recipes.ooo.calibration import Parameters, calibrate, read_runs
from retime.recipes.ooo.model_costs import SETTINGS, V100, Setting, calibrated, compute_ms, count, layer_costs
from retime.recipes.ooo.settings import SimulatedSettings
from retime.schedules import LayerCost, systems
from retime.schedules.systems import BASELINE_OF, BYTEPS, HEADINGS, OURS, OURS_PRIORITY, PRIORITY, Sizes, run

K45 = "reverse first-45 on BytePS"
_DEVICES, _CLUSTER = 16, "Pub-A"


class Discussion(SimulatedRecipe[SimulatedSettings]):
    """Two numbers of the text are given to the simulator, computation and baseline's overhead; the others come out."""

    def measure(self, settings: SimulatedSettings, at: dict[str, Any], tick: Tick) -> Measured:
        costs, setting, share = discussed(settings)
        cluster = setting.cluster(_DEVICES, share, settings.latency_ms)
        sizes = Sizes(settings.partition_bytes, settings.bucket_bytes)
        k = 45
        runs = {
            HEADINGS[BYTEPS]: run(BYTEPS, costs, cluster, sizes),
            K45: run(OURS, costs, cluster, sizes, k),
            f"{HEADINGS[OURS]}, best k": run(OURS, costs, cluster, sizes),
            HEADINGS[PRIORITY]: run(PRIORITY, costs, cluster, sizes),
            f"{HEADINGS[OURS_PRIORITY]}, best k": run(OURS_PRIORITY, costs, cluster, sizes),
        }
        rows = []
        for name, (_, ran) in runs.items():
            parts = {"step": ran.step_ms, "computation": ran.compute_ms, "communication overhead": ran.idle_ms}
            rows += [Row(name, quantity, "ms", [ms]) for quantity, ms in parts.items()]
        facts = {
            "layers": len(costs),
            "gradient MB": round(sum(cost.size_bytes for cost in costs) / 1e6, 1),
            "GPU efficiency": round(setting.gpu.efficiency, 3),
            "network Gbit/s": round(cluster.between_nodes.bits_per_s / 1e9, 3),
            "best k": {name: k for name, (k, _) in runs.items() if "best" in name},
            "W2 to W45 (ms)": round(sum(cost.weight_gradient_ms for cost in costs[1:k]), 2),
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


def discussed(settings: SimulatedSettings) -> tuple[list[LayerCost], Setting, float]:
    """The discussed network's layers on the discussed GPU, at the efficiency that the stated computation time gives.

    Last comes the share of the network's data sheet at which the baseline's communication overhead is the stated one.

    Raises:
        ValueError: no share gives it.
    """
    setting = SETTINGS[_CLUSTER]
    operations = count(lambda: build(settings.model), settings.image_size)
    gpu = calibrated(setting.gpu, operations, settings.batch_size, settings.compute_ms)
    costs = layer_costs(operations, gpu, settings.batch_size)
    assert abs(compute_ms(costs) - settings.compute_ms) < 1e-6 * settings.compute_ms
    setting = setting.with_efficiency(gpu.efficiency)
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
    return costs, setting, high


PAPERS_NETWORK, CALIBRATED = "section 8.3", "calibrated"
OVER = {OURS: "over BytePS in the order made", OURS_PRIORITY: "over BytePS with ideal priorities"}
"""Reverse first-k on either of them, over the same without."""
_CHECKED, _CHECKED_BATCH = "images/s on a P100 SXM2", 64


class Scaling(SimulatedRecipe[SimulatedSettings]):
    """A point a cluster, network model and neural network; a quantity a number of GPUs."""

    over = (("network", "networks"), ("cluster", "clusters"), ("model", "models"))

    def __init__(self) -> None:
        self._operations: dict[str, list[model_costs.Operations]] = {}
        self._discussed: tuple[float, float] | None = None  # the GPU's efficiency, and the network's share
        self._calibration: tuple[Parameters, dict[str, float]] | None = None

    def points(self, settings: SimulatedSettings) -> list[dict[str, Any]]:
        for name, options in (("clusters", list(SETTINGS)), ("networks", [PAPERS_NETWORK, CALIBRATED])):
            if unknown := sorted(set(getattr(settings, name)) - set(options)):
                raise ValueError(f"{name}={unknown}: there are {', '.join(options)}")
        measured = Path(settings.calibration).exists()
        return [at for at in super().points(settings) if at["network"] != CALIBRATED or measured]

    def measure(self, settings: SimulatedSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if self._discussed is None:
            _, setting, share = discussed(settings)
            self._discussed = setting.gpu.efficiency, share
        efficiency, share = self._discussed
        calibration = None
        if at["network"] == CALIBRATED:
            calibration = self._calibration = self._calibration or calibrate(read_runs(Path(settings.calibration)))
            share = calibration[0].share
        model = at["model"]
        if model not in self._operations:
            self._operations[model] = count(lambda: build(settings.models[model]), settings.image_size)
        operations = self._operations[model]
        setting = SETTINGS[at["cluster"]].with_efficiency(efficiency)
        batch_size = setting.batch_sizes.get(model, setting.batch_size)
        costs = layer_costs(operations, setting.gpu, batch_size)
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
        if model in ("ResNet-50", "ResNet-152"):
            p100 = dataclasses.replace(model_costs.P100_SXM2, efficiency=efficiency)
            step_ms = compute_ms(layer_costs(operations, p100, _CHECKED_BATCH))
            facts[_CHECKED] = round(1e3 * _CHECKED_BATCH / step_ms, 1)
        if calibration is not None:
            parameters, errors = calibration
            mean_error, worst_error = fmean(map(abs, errors.values())), max(errors.values(), key=abs)
            numbers = {**dataclasses.asdict(parameters), "mean_error": mean_error, "worst_error": worst_error}
            rounded = {name: round(value, 4) for name, value in numbers.items()}
            by_run = {name: round(error, 4) for name, error in errors.items()}
            facts["calibration"] = {"runs": len(errors), **rounded, "errors": by_run}
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
        for model in ("ResNet-50", "ResNet-152"):
            claim, note = claims.claim(f"p100-{model.lower()}"), "roofline calibrated on V100, ResNet-50"
            checked = [p.facts[_CHECKED] for p in _points(result, model=model) if _CHECKED in p.facts]
            lines += [Comparison(claim, spread([images]), note) for images in checked[:1]]
        return lines

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
        return [
            *lines,
            "Reverse first-k gains over a network that sends in the order made. Over ideal priorities it gains only "
            "where the network idles: one that is always busy with the most urgent gradient needs no other order.",
            "DenseNet and MobileNet are bound by issuing kernels (section 2), which a roofline does not know: their "
            "computation is too short here, so communication weighs more than in the paper and the gain is too large.",
        ]

    def tables(self, result: Result) -> list[Table]:
        """The gains with as many GPUs as the cluster has."""
        heading = ("network", "cluster", "model", "GPUs", "BytePS", "reverse first-k", *OVER.values())
        table = Table(*heading, title=result.title)
        for point in result.points:
            devices = point.facts["devices"][-1]
            images = [amount(point.values(name, _quantity(devices))[0], "images/s") for name in (BYTEPS, OURS)]
            gains = [amount(_gain(point, devices, ours), "x") for ours in OVER]
            table.add_row(*map(str, point.at.values()), str(devices), *images, *gains)
        return [table]

    def draw(self, result: Result, path: Path) -> None:
        network = result.points[0].at["network"]
        points = _points(result, network=network)
        clusters = list(dict.fromkeys(point.at["cluster"] for point in points))
        title = f"{result.title}\nnetwork as in {network}; solid: {OVER[OURS]}, dashed: {OVER[OURS_PRIORITY]}"
        drawing, panels = charts.panels(title, max(2, len(clusters)), width=10.7, height=5.4)
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


def _quantity(devices: int) -> str:
    return f"{devices} GPU" if devices == 1 else f"{devices} GPUs"


def _gain(point: Point, devices: int, ours: str) -> float:
    """Reverse first-k over the BytePS that it runs on."""
    quantity = _quantity(devices)
    return point.values(ours, quantity)[0] / point.values(BASELINE_OF[ours], quantity)[0]


def _points(result: Result, **at: str) -> list[Point]:
    return [point for point in result.points if all(point.at[key] == value for key, value in at.items())]


def _draw_throughput(points: list[Point], clusters: list[str], result: Result, path: Path) -> None:
    """The figure as the paper draws it: images a second of the first two networks."""
    drawing, panels = charts.panels(result.title, max(2, len(clusters)), width=13, height=5.4)
    for axes, cluster in zip(panels, clusters, strict=False):
        shown = [point for point in points if point.at["cluster"] == cluster][:2]
        for style, point in zip(("-", "--"), shown, strict=False):
            devices = point.facts["devices"]
            for index, system in enumerate((systems.DDP, BYTEPS, PRIORITY, OURS, systems.OURS_DDP)):
                images = [point.values(system, _quantity(number))[0] for number in devices]
                label = f"{point.at['model']}, {HEADINGS[system]}"
                axes.plot(devices, images, "o" + style, color=charts.COLOURS[index], label=label, markersize=3)
        axes.set_title(f"{cluster}: {SETTINGS[cluster].gpu.name}", fontsize=10)
        charts.whole_ticks(axes, "GPUs")
    panels[0].set_ylabel("images/s")
    charts.legend_below(drawing, panels[0], 2)
    charts.save(drawing, path)
