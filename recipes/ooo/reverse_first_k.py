"""How fast reverse first-k trains on ranks: over hosts, over k, and against what this project wants it to reach.

`ooo_fig10` is the measured part of Figure 10: up to as many hosts as this machine has cores compute for real; beyond
that, and for comparison below it, the layers sleep for the times measured on a real rank. The simulated part of the
figure is calibrated on these points. `ooo_ksweep` has the throughput for every k, which the paper takes to be concave,
and the search's way over it. `ooo_targets` has this project's own targets, each case with its numbers.
"""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, paper, show
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, best_of, percent_more, ratio, titled
from retime.recipes.ooo import cluster as on_ranks
from retime.recipes.ooo.claims import claim, target
from retime.recipes.ooo.cluster import IDENTICAL, IDLE, MIB, PEAK, OnRanks, best_of_ours, bound_ms, bound_notes
from retime.recipes.ooo.settings import OutOfOrderSettings, of_case
from retime.recipes.ooo.variants import BOUNDS, label, variant

REAL, EMULATED = "real", "emulated"


class Hosts(OnRanks):
    """One point for each number of hosts and kind of computation."""

    axes = ("host_counts",)

    def __init__(self) -> None:
        self._known_costs: dict[int, dict[str, Any]] = {}

    def points(self, settings: OutOfOrderSettings) -> list[dict[str, Any]]:
        cores = len(os.sched_getaffinity(0))
        real = [count for count in settings.host_counts if count <= cores]
        points = [{"hosts": count, "compute": REAL} for count in real]
        if settings.emulate_compute:
            points += [{"hosts": count, "compute": EMULATED} for count in settings.host_counts]
        elif len(real) < len(settings.host_counts):
            raise ValueError(
                f"host_counts has more hosts than this machine has cores ({cores}): set emulate_compute=true"
            )
        return points

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        hosts = at["hosts"]
        busy = min(hosts, len(os.sched_getaffinity(0)))
        if busy not in self._known_costs:  # of layers, with as many ranks at work as the cores will be shared by later
            with self.network(settings, busy, settings.rate) as network:
                self._known_costs[busy] = self.run_job(settings, network, tick, "layers")[0]
        costs = self._known_costs[busy]
        sleeping = costs["layers"] if at["compute"] == EMULATED else None
        names = [name for name in settings.variants if hosts > 1 or name.startswith("ddp")]
        measured = self.compare_variants(replace(settings, hosts=hosts, variants=names), tick, sleeping=sleeping)
        measured.facts["layers"] = costs["layers"]
        measured.facts["cluster"]["update_ms"] = costs["update_ms"]
        return measured

    def compare(self, result: Result) -> list[Comparison]:
        ratios = []
        for point in result.points:
            for name in point.variants("step") if point.at["compute"] == REAL else []:
                if name not in BOUNDS and variant(name).priority:
                    over = ratio(point, name, best_of_ours(point) or "")
                    ratios.append((over, f"{point.at['hosts']} hosts, over a peer: {label(name)}"))
        lines = ratios or [(None, "no peer here sends by priority, as BytePS does")]
        return [Comparison(claim(f"hosts-{part}"), over, note) for part in "abc" for over, note in lines]

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in sorted(result.points, key=lambda point: (point.at["compute"], point.at["hosts"])):
            lines += bound_notes(point, f"{point.at['compute']} computation")
            ours = best_of_ours(point)
            peers = [name for name in point.variants("step") if name not in (*BOUNDS, ours)]
            over = {label(name): ratio(point, name, ours) for name in peers if ours}
            gains = [f"{show(gain, 'x')} over {name}" for name, gain in over.items() if gain]
            if gains:
                where = f"{point.at['compute']} computation, {point.at['hosts']} hosts"
                lines.append(f"- {where}: reverse-first-k, k tuned, is {', '.join(gains)}")
        real = {point.at["hosts"]: point for point in result.points if point.at["compute"] == REAL}
        for point in result.points:
            twin = real.get(point.at["hosts"])
            if point.at["compute"] == EMULATED and twin:
                share = point.median("ddp", "step") / twin.median("ddp", "step")
                lines.append(f"- sleeping layers take {share:.2f} of the real ddp's step on {point.at['hosts']} hosts")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        kinds = [kind for kind in (REAL, EMULATED) if any(point.at["compute"] == kind for point in result.points)]
        drawing, panels = charts.one_or_panels(titled(result), len(kinds), sharey=True)
        for axes, kind in zip(panels, kinds, strict=True):
            points = sorted((p for p in result.points if p.at["compute"] == kind), key=lambda p: int(p.at["hosts"]))
            names = dict.fromkeys(name for point in points for name in point.variants("step") if name not in BOUNDS)
            hosts = [point.at["hosts"] for point in points]
            for index, name in enumerate(names):
                speeds = [throughput(p, p.values(name, "step")) if p.has(name, "step") else None for p in points]
                charts.points_with_spread(axes, hosts, speeds, label(name), index, line=True)
            bounds = [throughput(point, bound_ms(point)).median for point in points]
            axes.plot(hosts, bounds, "--", color=charts.GREY, label="bound")
            axes.set_title(f"{kind} computation", fontsize=10)
            axes.set_xlabel("hosts")
            axes.set_xticks(hosts)
        panels[0].set_ylim(bottom=0)  # after all is drawn: the panels share their scale
        panels[0].set_ylabel("samples per second, all hosts")
        panels[-1].legend(fontsize=8)
        charts.save(drawing, path)


def throughput(point: Point, step_ms: list[float]) -> Spread:
    """Samples per second of all hosts together."""
    samples = 1e3 * point.facts["cluster"]["batch_size"] * point.facts["cluster"]["hosts"]
    return spread([samples / value for value in step_ms])


class Sweep(OnRanks):
    """One point: every k of `ks` beside plain DDP, all interleaved."""

    def points(self, settings: OutOfOrderSettings) -> list[dict[str, Any]]:
        if not settings.ks:
            raise ValueError("ks is empty: name the k to measure, as in ks=[0,2,4]")
        return super().points(settings)

    def blocks(self, settings: OutOfOrderSettings) -> int | None:
        count = len(settings.variants) + len(settings.ks) + 2
        return 2 + count * (settings.rounds + settings.warmup_rounds)

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        variants = [*settings.variants, *(f"ooo_k{k}" for k in settings.ks)]
        return self.compare_variants(replace(settings, variants=variants), tick)

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        best = str(best_fixed(point))
        wanted = Target(f"best k of the sweep ({best}) over ddp", "x", 1.25)
        lines = [Comparison(wanted, ratio(point, "ddp", best), _peer_note(point, best))]
        if point.has("ooo_tuned", "step"):
            auto = f"auto k={point.facts['cluster']['k']}"
            lines.append(Comparison(target("sweep-search"), within_best(point), auto))
        return lines

    def notes(self, result: Result) -> list[str]:
        (point,) = result.points
        lines = bound_notes(point, "sweep")
        speeds = {k: 1 / point.median(name, "step") for k, name in fixed(point).items()}
        if len(speeds) > 2:
            breaks = concavity_breaks(speeds)
            remark = f"but at {breaks} of {len(speeds)} k" if breaks else "as the paper's search assumes"
            lines.insert(0, f"- throughput over k rises to one top and falls after it, {remark}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        cluster = point.facts["cluster"]
        rate = f"{cluster['rate_bits'] / 1e9:.3g} Gbit/s" if cluster["rate_bits"] else "unshaped"
        drawing, axes = charts.figure(titled(result, f"{cluster['hosts']} hosts, {rate}"), width=9)
        names = fixed(point)
        speeds = [throughput(point, point.values(name, "step")) for name in names.values()]
        charts.points_with_spread(axes, list(names), speeds, "every k, interleaved", 0, line=True)
        for index, name in enumerate((name for name in point.variants("step") if name.startswith("ddp")), start=1):
            middle = throughput(point, point.values(name, "step")).median
            axes.axhline(middle, color=charts.COLOURS[index], linestyle="--", linewidth=1.2, label=label(name))
        bound = throughput(point, bound_ms(point)).median
        axes.axhline(bound, color=charts.GREY, linewidth=1.5, label="bound max(compute, communication)")
        way = [(k, throughput(point, [ms]).median) for k, ms in point.facts.get("search", {}).get("path", [])]
        if way:
            text = "the search's own measurements, in order"
            axes.plot(*zip(*way, strict=True), color=charts.COLOURS[3], marker="x", linestyle=":", label=text)
            for number, place in enumerate(way, start=1):
                axes.annotate(str(number), place, textcoords="offset points", xytext=(4, 5), fontsize=8)
        axes.set_xlabel("k: layers whose weight gradients are computed last")
        axes.set_ylabel("samples per second, all hosts")
        axes.set_ylim(bottom=0)
        charts.legend_beside(axes)
        charts.save(drawing, path)


def fixed(point: Point) -> dict[int, str]:
    """The plain fixed-k variants of a point, by k."""
    names = {int(name[5:]): name for name in point.variants("step") if re.fullmatch(r"ooo_k\d+", name)}
    return dict(sorted(names.items()))


def best_fixed(point: Point) -> str | None:
    """The fixed k with the least median step time."""
    return point.fastest(fixed(point).values(), "step")


def within_best(point: Point) -> Spread | None:
    """By how many percent the tuned k's steps are longer than those of the sweep's best k, in each round."""
    best = best_fixed(point)
    return None if best is None else percent_more(point, "ooo_tuned", best, "step")


def concavity_breaks(speeds: dict[int, float]) -> int:
    """Number of k that are slower than the one before them on the way up to the top, or faster on the way down.

    Differences below 1 % are taken for noise.
    """
    values = [speeds[k] for k in sorted(speeds)]
    top = values.index(max(values))
    up = sum(after < 0.99 * before for before, after in pairwise(values[: top + 1]))
    down = sum(after > 1.01 * before for before, after in pairwise(values[top:]))
    return up + down


EXTRA_PERCENT = 1.0
SHOWN = ("ddp", "ddp_layer_buckets", "ooo_tuned")
"""Variants whose steps are taken apart."""
PARTS = ("forward", "backward", "communication exposed", "update")


class Targets(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a point: step times of the variants, or peak memory (`kind: memory`)."""

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case, kind = of_case(settings, at["case"], "kind"), settings.cases[at["case"]].get("kind", "times")
        if kind == "times":
            return self.compare_variants(case, tick, timelines=[name for name in SHOWN if name in case.variants])
        if kind != "memory":
            raise ValueError(f"cases.{at['case']}.kind={kind!r} is unknown: choose times or memory")
        return self.peaks(case, tick)

    def compare(self, result: Result) -> list[Comparison]:
        points = {point.at["case"]: point for point in result.points}
        lines = []
        for case, least in paper("ooo").targets["speed"].items():
            if case in points:
                ours = best_of_ours(points[case])
                ceiling = on_ranks.busy_ceiling(points[case])
                allows = f"the processor alone allows {ceiling.median:.2f} x" if ceiling else ""
                note = "; ".join(filter(None, (_peer_note(points[case], ours), allows)))
                wanted = Target(f"{case}: out of order over Lightning's ddp", "x", least)
                lines.append(Comparison(wanted, ratio(points[case], "ddp", ours) if ours else None, note))
        mlp = points.get("mlp")
        if mlp is not None:
            ours, plain, best = best_of_ours(mlp), on_ranks.bound_fraction(mlp, "ddp"), best_fixed(mlp)
            if ours:
                note = f"ddp {plain.median:.2f}" if plain else ""
                lines.append(Comparison(target("bound"), on_ranks.bound_fraction(mlp, ours), note))
            if best and mlp.has("ooo_tuned", "step"):
                among = ", ".join(str(k) for k in fixed(mlp))
                note = f"auto k={mlp.facts['cluster']['k']}, best {best} of k={among}; ooo_ksweep has the full sweep"
                lines.append(Comparison(target("search"), within_best(mlp), note))
            if (steps := mlp.facts.get("search", {}).get("steps")) is not None:
                lines.append(Comparison(target("search-steps"), spread([float(steps)])))
        # by case, whether all variants end with the weights of ddp
        same = {
            case: {*point.variants("step")} - {*BOUNDS} <= {*point.facts[IDENTICAL].split(", ")}
            for case, point in points.items()
            if case.startswith("identical")
        }
        if same:
            cases = ", ".join(case.removeprefix("identical_") for case in same)
            lines.append(Comparison(target("identical"), spread([100.0 * sum(same.values()) / len(same)]), cases))
        if "memory" in points:
            lines += _memory(points["memory"], mlp)
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            line
            for point in result.points
            if "cluster" in point.facts and not point.at["case"].startswith("identical")
            for line in bound_notes(point, point.at["case"])
        ]

    def draw(self, result: Result, path: Path) -> None:
        points = [p for p in result.points if p.has("ddp", "step") and not p.at["case"].startswith("identical")]
        ours_ms = {point.at["case"]: point.median(name, "step") for point in points if (name := best_of_ours(point))}
        points.sort(key=lambda p: p.median("ddp", "step") / ours_ms.get(p.at["case"], float("inf")), reverse=True)
        height = 1.5 + 1.2 * max(3, len(points))
        drawing, (left, right) = charts.panels(titled(result, "by gain"), 2, width=16, height=height)
        names = ("ddp_layer_buckets", "ooo_k0", "ooo_tuned_waiting", "ooo_tuned")
        charts.beside(left, [(label(name), [ratio(p, "ddp", name) for p in points]) for name in names], 0.17)
        # right: where a step goes, by StepTimeline, and the idle part of the core's time as a line below each bar
        places, bars, idle = [], {}, []
        for place, point in enumerate(points):
            case, rate = point.at["case"], point.facts["cluster"]["rate_bits"]
            places.append(f"{case}\n{rate / 1e9:.2g} Gbit/s" if rate else f"{case}\nno limit")
            if (least := paper("ooo").targets["speed"].get(case)) is not None:
                left.hlines(least, place - 0.4, place + 0.4, color=charts.GREY, linewidth=2.5, alpha=0.6)
            if ceiling := on_ranks.busy_ceiling(point):
                left.hlines(ceiling.median, place - 0.4, place + 0.4, color="black", linewidth=1, linestyle=":")
            for name in (name for name in SHOWN if point.has(name, PARTS[0])):
                parts = {part: point.median(name, part) for part in PARTS if point.has(name, part)}
                parts["backward"] -= parts.get("communication exposed", 0.0)
                bars[f"{case}: {label(name)}"] = parts
                idle.append(point.median(name, IDLE))
        left.plot([], [], color=charts.GREY, linewidth=2.5, alpha=0.6, label="wanted at least")
        left.plot([], [], color="black", linewidth=1, linestyle=":", label="ceiling: ddp's step without its idle time")
        charts.even_line(left, "Lightning's ddp")
        left.set_xticks(range(len(points)), places)
        left.set_ylabel("steps per second against ddp (x)")
        charts.stacked_bars(right, bars, "ms of a step, one more fit with StepTimeline")
        for place, (bar, milliseconds) in enumerate(zip(bars.values(), idle, strict=True)):
            end = sum(bar.values())
            right.plot([end - milliseconds, end], [place + 0.4] * 2, color="black", linewidth=2.5)
        right.plot([], [], color="black", linewidth=2.5, label="core idle")
        for axes in (left, right):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=8)
        charts.save(drawing, path)


def _memory(point: Point, timed: Point | None) -> list[Comparison]:
    """Peak memory against ddp's at the k that the search found, or at every measured k if it found none of them."""
    names = [name for name in point.variants(PEAK) if name.startswith("ooo_")]
    if timed is not None:
        names = [name for name in names if name == f"ooo_k{timed.facts['cluster']['k']}"] or names
    lines = []
    for ours in names if point.has("ddp", PEAK) else []:
        plain = point.values("ddp", PEAK)
        bucket_mib = min(point.settings.get("layer_bucket_mb", 4.0), point.facts["gradient bytes"] / MIB)
        bound = EXTRA_PERCENT / 100 * point.median("ddp", PEAK) + bucket_mib
        extra = spread([mine - ddp for mine, ddp in zip(point.values(ours, PEAK), plain, strict=True)])
        wanted = Target(f"mlp: extra peak memory, {label(ours)} (1 % plus one bucket)", "MiB", bound, at_most=True)
        lines.append(Comparison(wanted, extra))
    return lines


def _peer_note(point: Point, ours: str | None) -> str:
    peer = best_of(point, "ddp", "step")
    speedup = ratio(point, peer, ours) if ours else None
    if speedup is None or peer == "ddp" or peer is None:
        return ""
    return f"{speedup.median:.2f} x over {label(peer)}"
