"""`ooo_ksweep`: throughput for every k, which the paper takes to be concave, and the search's way over it."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, ratio, titled
from retime.recipes.ooo.claims import target
from retime.recipes.ooo.cluster import OnRanks, bound_ms, bound_notes, strongest_peer
from retime.recipes.ooo.settings import OutOfOrderSettings
from retime.recipes.ooo.variants import label


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
        lines = []
        for point in result.points:
            best = best_fixed(point)
            if best is None:
                continue
            found, peer = ratio(point, "ddp", best), strongest_peer(point)
            over = ratio(point, peer, best)
            note = f"{over.median:.2f} x over {label(peer)}" if peer and over and peer != "ddp" else ""
            lines.append(Comparison(Target(f"best k of the sweep ({best}) over ddp", "x", 1.25), found, note))
            if point.has("ooo_tuned", "step"):
                auto = f"auto k={point.facts['cluster']['k']}"
                lines.append(Comparison(target("sweep-search"), within_best(point), auto))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            speeds = {k: 1 / spread(point.values(name, "step")).median for k, name in fixed(point).items()}
            if len(speeds) > 2:
                breaks = concavity_breaks(speeds)
                lines.append(
                    f"- throughput over k rises to one top and falls after it, but at {breaks} of {len(speeds)} k"
                    if breaks
                    else "- throughput over k rises to one top and falls after it, as the paper's search assumes"
                )
            lines += bound_notes(point, "sweep")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        samples = 1e3 * point.facts["cluster"]["batch_size"] * point.facts["cluster"]["hosts"]
        drawing, axes = charts.figure(titled(result, _links(point)), width=9)
        names = fixed(point)
        speeds = [_throughput(point.values(name, "step"), samples) for name in names.values()]
        if names:
            charts.points_with_spread(axes, list(names), speeds, "every k, interleaved", 0, line=True)
        for index, name in enumerate((name for name in point.variants("step") if name.startswith("ddp")), start=1):
            middle = _throughput(point.values(name, "step"), samples).median
            axes.axhline(middle, color=charts.COLOURS[index], linestyle="--", linewidth=1.2, label=label(name))
        bound = _throughput(bound_ms(point), samples).median
        axes.axhline(bound, color=charts.GREY, linewidth=1.5, label="bound max(compute, communication)")
        way = point.facts.get("search", {}).get("path", [])
        if way:
            axes.plot(
                [k for k, _ in way],
                [samples / ms for _, ms in way],
                color=charts.COLOURS[3],
                marker="x",
                linestyle=":",
                label="the search's own measurements, in order",
            )
            for number, (k, ms) in enumerate(way, start=1):
                axes.annotate(str(number), (k, samples / ms), textcoords="offset points", xytext=(4, 5), fontsize=8)
        axes.set_xlabel("k: layers whose weight gradients are computed last")
        axes.set_ylabel("samples per second, all hosts")
        axes.set_ylim(bottom=0)
        charts.legend_beside(axes)
        charts.save(drawing, path)


def fixed(point: Point) -> dict[int, str]:
    """The plain fixed-k variants of a point, by k."""
    found = {int(name[5:]): name for name in point.variants("step") if re.fullmatch(r"ooo_k\d+", name)}
    return dict(sorted(found.items()))


def best_fixed(point: Point) -> str | None:
    """The fixed k with the least median step time."""
    return min(fixed(point).values(), key=lambda name: spread(point.values(name, "step")).median, default=None)


def within_best(point: Point) -> Spread | None:
    """By how many percent the tuned k's steps are longer than those of the sweep's best k, in each round."""
    best = best_fixed(point)
    if best is None or not point.has("ooo_tuned", "step"):
        return None
    pairs = zip(point.values("ooo_tuned", "step"), point.values(best, "step"), strict=True)
    return spread([100 * (tuned / other - 1) for tuned, other in pairs])


def search_steps(point: Point) -> int | None:
    """How many training steps k="auto" took to decide, if its run said so."""
    steps = point.facts.get("search", {}).get("steps")
    return None if steps is None else int(steps)


def concavity_breaks(speeds: dict[int, float]) -> int:
    """How many k are slower than the one before them on the way up to the top, or faster on the way down.

    Differences below 1 % are taken for noise.
    """
    values = [speeds[k] for k in sorted(speeds)]
    top = values.index(max(values))
    up = sum(after < 0.99 * before for before, after in pairwise(values[: top + 1]))
    down = sum(after > 1.01 * before for before, after in pairwise(values[top:]))
    return up + down


def _throughput(step_ms: list[float], samples: float) -> Spread:
    return spread([samples / value for value in step_ms])


def _links(point: Point) -> str:
    cluster = point.facts["cluster"]
    rate = f"{cluster['rate_bits'] / 1e9:.3g} Gbit/s" if cluster["rate_bits"] else "unshaped"
    return f"{cluster['hosts']} hosts, {rate}"
