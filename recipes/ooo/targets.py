"""`ooo_targets`: what this project wants out-of-order data parallel training to reach, each case with its numbers."""

from math import inf
from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, paper
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, ratio, titled
from retime.recipes.ooo.cases import of_case
from retime.recipes.ooo.claims import target
from retime.recipes.ooo.cluster import (
    IDLE,
    MIB,
    PEAK,
    OnRanks,
    best_of_ours,
    bound_fraction,
    bound_notes,
    busy_ceiling,
    strongest_peer,
)
from retime.recipes.ooo.settings import OutOfOrderSettings
from retime.recipes.ooo.sweep import best_fixed, fixed, search_steps, within_best
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, label

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
        for case, least in _speeds().items():
            if case in points:
                ours = best_of_ours(points[case])
                note = "; ".join(filter(None, (_peer_note(points[case], ours), _ceiling_note(points[case]))))
                wanted = Target(f"{case}: out of order over Lightning's ddp", "x", least)
                lines.append(Comparison(wanted, ratio(points[case], "ddp", ours) if ours else None, note))
        if "mlp" in points:
            lines += _mlp(points["mlp"])
        same = [point for case, point in points.items() if case.startswith("identical")]
        if same:
            share = [100.0 * _all_identical(point) for point in same]
            cases = ", ".join(point.at["case"].removeprefix("identical_") for point in same)
            lines.append(Comparison(target("identical"), spread([sum(share) / len(share)]), cases))
        if "memory" in points:
            lines += _memory(points["memory"], points.get("mlp"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            line
            for point in result.points
            if "cluster" in point.facts and not point.at["case"].startswith("identical")
            for line in bound_notes(point, point.at["case"])
        ]

    def draw(self, result: Result, path: Path) -> None:
        points = [point for point in result.points if point.has("ddp", "step") and not _is_identity(point)]
        points.sort(key=lambda point: spread(point.values("ddp", "step")).median / _fastest_ours(point), reverse=True)
        drawing, (speeds, parts) = charts.panels(
            titled(result, "by gain"), 2, width=16, height=1.5 + 1.2 * max(3, len(points))
        )
        _draw_speeds(speeds, points)
        _draw_parts(parts, points)
        charts.save(drawing, path)


def _speeds() -> dict[str, float]:
    """The least speeds over ddp, by case."""
    speeds: dict[str, float] = paper("ooo").targets["speed"]
    return speeds


def _is_identity(point: Point) -> bool:
    return str(point.at["case"]).startswith("identical")


def _fastest_ours(point: Point) -> float:
    name = best_of_ours(point)
    return spread(point.values(name, "step")).median if name else inf


def _draw_speeds(axes: Any, points: list[Point]) -> None:
    names = ("ddp_layer_buckets", "ooo_k0", "ooo_tuned_waiting", "ooo_tuned")
    for index, name in enumerate(names):
        places = [place + (index - (len(names) - 1) / 2) * 0.17 for place in range(len(points))]
        charts.points_with_spread(axes, places, [ratio(p, "ddp", name) for p in points], label(name), index)
    for place, point in enumerate(points):
        if (least := _speeds().get(point.at["case"])) is not None:
            axes.hlines(least, place - 0.4, place + 0.4, color=charts.GREY, linewidth=2.5, alpha=0.6)
        ceiling = busy_ceiling(point)
        if ceiling:
            axes.hlines(ceiling.median, place - 0.4, place + 0.4, color="black", linewidth=1, linestyle=":")
    axes.plot([], [], color=charts.GREY, linewidth=2.5, alpha=0.6, label="wanted at least")
    axes.plot([], [], color="black", linewidth=1, linestyle=":", label="ceiling: ddp's step without its idle time")
    charts.even_line(axes, "Lightning's ddp")
    axes.set_xticks(range(len(points)), [_place(point) for point in points])
    axes.set_ylabel("steps per second against ddp (x)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=8)


def _draw_parts(axes: Any, points: list[Point]) -> None:
    """Where a step goes, by StepTimeline, with the idle part of the core's time as a line below each bar."""
    bars, idle = {}, []
    for point in points:
        for name in SHOWN:
            if not point.has(name, PARTS[0]):
                continue
            found = {part: spread(point.values(name, part)).median for part in PARTS if point.has(name, part)}
            found["backward"] -= found.get("communication exposed", 0.0)
            bars[f"{point.at['case']}: {label(name)}"] = found
            idle.append(spread(point.values(name, IDLE)).median)
    charts.stacked_bars(axes, bars, "ms of a step, one more fit with StepTimeline")
    for place, (bar, milliseconds) in enumerate(zip(bars.values(), idle, strict=True)):
        end = sum(bar.values())
        axes.plot([end - milliseconds, end], [place + 0.4] * 2, color="black", linewidth=2.5)
    axes.plot([], [], color="black", linewidth=2.5, label="core idle")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=8)


def _mlp(point: Point) -> list[Comparison]:
    """The rows of the table that the first case answers besides its speed."""
    ours = best_of_ours(point)
    plain = bound_fraction(point, "ddp")
    note = f"ddp {plain.median:.2f}" if plain else ""
    lines = []
    if ours:
        lines.append(Comparison(target("bound"), bound_fraction(point, ours), note))
    best = best_fixed(point)
    if best and point.has("ooo_tuned", "step"):
        among = ", ".join(str(k) for k in fixed(point))
        note = f"auto k={point.facts['cluster']['k']}, best {best} of k={among}; ooo_ksweep has the full sweep"
        lines.append(Comparison(target("search"), within_best(point), note))
    steps = search_steps(point)
    if steps is not None:
        lines.append(Comparison(target("search-steps"), spread([float(steps)])))
    return lines


def _memory(point: Point, timed: Point | None) -> list[Comparison]:
    """Peak memory against ddp's at the k that the search found, or at every measured k if it found none of them."""
    names = [name for name in point.variants(PEAK) if name.startswith("ooo_")]
    if timed is not None:
        names = [name for name in names if name == f"ooo_k{timed.facts['cluster']['k']}"] or names
    lines = []
    for ours in names if point.has("ddp", PEAK) else []:
        plain = point.values("ddp", PEAK)
        bucket_mib = min(point.settings.get("layer_bucket_mb", 4.0), point.facts["gradient bytes"] / MIB)
        bound = EXTRA_PERCENT / 100 * spread(plain).median + bucket_mib
        extra = spread([mine - ddp for mine, ddp in zip(point.values(ours, PEAK), plain, strict=True)])
        wanted = Target(f"mlp: extra peak memory, {label(ours)} (1 % plus one bucket)", "MiB", bound, at_most=True)
        lines.append(Comparison(wanted, extra))
    return lines


def _all_identical(point: Point) -> bool:
    found = point.facts["final weights bit-identical to ddp, on all ranks"].split(", ")
    return all(name in found for name in point.variants("step") if name not in (COMPUTE, COMMUNICATION))


def _ceiling_note(point: Point) -> str:
    ceiling = busy_ceiling(point)
    return f"the processor alone allows {ceiling.median:.2f} x" if ceiling else ""


def _peer_note(point: Point, ours: str | None) -> str:
    peer = strongest_peer(point)
    found = ratio(point, peer, ours) if ours else None
    if found is None or peer == "ddp" or peer is None:
        return ""
    return f"{found.median:.2f} x over {label(peer)}"


def _place(point: Point) -> str:
    rate = point.facts["cluster"]["rate_bits"]
    return f"{point.at['case']}\n{rate / 1e9:.2g} Gbit/s" if rate else f"{point.at['case']}\nno limit"
