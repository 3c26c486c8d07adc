"""`modnn_budget_sweep`: real training inside budgets from 100 % of the ideal peak down to the floor, side by side."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, titled
from retime.recipes.modnn import side_by_side as runs
from retime.recipes.modnn.settings import MemorySettings, NetworkRecipe, claim, target
from retime.recipes.modnn.side_by_side import BUDGET, FLOOR, MEASURED, MOVED, PREDICTED, STEP, budgets_of, slowdown


class Budgets(NetworkRecipe):
    """A point a network; a variant a budget."""

    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        for budget in settings.budgets:
            if budget != FLOOR and not (isinstance(budget, int | float) and budget > 0):
                raise ValueError(f"budgets has {budget!r}: give percents of the ideal peak, or {FLOOR!r}")
        return super().points(settings)

    def turns(self, settings: MemorySettings) -> int | None:
        if settings.peers:
            return None  # a batch is cut into as many parts as it has samples for
        return len(settings.budgets) * (1 + len(settings.rules)) + 3 + len(settings.allocators)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over unlimited": runs.UNLIMITED, "speed over the pool": runs.POOLED}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        return Measured(*runs.side_by_side(settings, settings.cases[at["network"]], settings.budgets, tick))

    def compare(self, result: Result) -> list[Comparison]:
        lines = [*runs.slowdowns(result.points)]
        for point in result.points:
            if "VGG" in point.at["network"]:
                needed = [runs.needed_mib(point, name) for name in budgets_of(point)]
                ratio = spread([point.facts["ideal peak MiB"] / min(needed)]) if needed else None
                remark = f"{point.at['network']}, batch {point.facts['batch size']}, trained"
                lines.append(Comparison(target("smallest-budget"), ratio, remark))
        for point in result.points:
            names, missing = budgets_of(point), runs.untrained(point, point.settings["budgets"])
            if names:
                error, where = max((abs(runs.prediction_error(point, name)), name) for name in names)
                note = f"{point.at['network']}, at {where}"
                lines.append(Comparison(target("prediction-error"), spread([error]), note))
            lines += [*_over_vdnn_plus(point), *runs.over_best_peers(point)]
            if point.settings["hardware"]["device"] == "cpu":  # elsewhere nothing limits memory
                died = point.facts["out of memory"]
                remark = ": ".join([point.at["network"], *([", ".join(died)] if died else [])])
                lines.append(Comparison(target("out-of-memory"), spread([len(died)]), remark))
            lines += runs.differences([point], missing)
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            runs.MEMORY,
            runs.POOL,
            runs.REVERSED,
            "vDNN+ is vDNN's rule executed for real, each storage back one ahead of its use, in the largest parts of "
            "the batch that fit the budget, with the same pool.",
            "By hand, with that pool too: the batch in 2 to 32 equal parts whose gradients add up, blocks under "
            "torch.utils.checkpoint, and torch.autograd.graph.save_on_cpu, which on a processor finds tensors where it "
            "would bring them (of a GPU: to pinned memory). The best peer of a budget is the fastest of the plain "
            "step, these and vDNN+ that held no more.",
            "Weights differ: norm of the difference of all weights over their norm.",
            "The floor's budget is the floor that a refusal names, asked for until there is none.",
        ]
        for point in result.points:
            lines += runs.plans_and_failures(point, point.at["network"])
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(titled(result), 2, width=12.0, height=7.2)
        for index, point in enumerate(result.points):
            network, names = point.at["network"], budgets_of(point)
            if not names:
                continue
            shares = [100 * point.values(name, BUDGET)[0] / point.facts["ideal peak MiB"] for name in names]
            slower = [slowdown(point, name) for name in names]
            label = f"{network} ({point.facts['batch size']}), ideal {point.facts['ideal peak MiB']:.0f} MiB"
            colour = charts.points_with_spread(panels[0], shares, slower, label, index, line=True)
            lowest = min(shares)
            for axes in panels:  # below it, a budget is refused
                axes.axvline(lowest, color=colour, linewidth=1, linestyle=":", alpha=0.7)
                axes.annotate(
                    f"{network}:\nfloor {lowest:.0f} %",
                    (lowest, 0.62 - 0.09 * index),
                    xycoords=("data", "axes fraction"),
                    fontsize=7,
                    color=colour,
                    ha="right" if lowest < 10 else "left",
                    va="top",
                )
            if pooled := slowdown(point, runs.POOLED):
                text = f"{network}, {runs.POOLED}"
                panels[0].plot([100], [pooled.median], "*", markersize=11, color=colour, label=text)
            for rule, marker in (("all", ":x"), ("conv", ":+")):
                theirs = [slowdown(point, runs.VDNN_PLUS.format(rule, name)) for name in names]
                curve = {place: value.median for place, value in zip(shares, theirs, strict=True) if value is not None}
                if curve:
                    text = f"{network}, vDNN+ ({rule})"
                    panels[0].plot([*curve], [*curve.values()], marker, color=colour, label=text)
            by_hand = ((runs.IN_SUB_BATCHES, "--v", "in parts by hand"), (runs.BY_HAND, "P", "others by hand"))
            for start, marker, text in by_hand:
                done = [name for name in point.variants(STEP) if name.startswith(start.format(""))]
                peaks = [100 * point.values(name, MEASURED)[0] / point.facts["ideal peak MiB"] for name in done]
                medians = [value.median for name in done if (value := slowdown(point, name))]
                if done:
                    panels[0].plot(peaks, medians, marker, color=colour, alpha=0.6, label=f"{network}, {text}")
            for quantity, marker in ((MEASURED, "o-"), (PREDICTED, "x--")):
                ratios = [point.values(name, quantity)[0] / point.values(name, BUDGET)[0] for name in names]
                panels[1].plot(shares, ratios, marker, color=colour, label=f"{network}, {quantity.split()[0]}")
        for axes in panels:
            axes.set_xscale("log")
            axes.invert_xaxis()
            axes.set_xlabel("budget (% of the ideal peak), less memory to the right")
            axes.set_xticks([100, 50, 25, 10, 5], ["100", "50", "25", "10", "5"])
        charts.even_line(panels[0], "fastest unlimited")
        charts.even_line(panels[1], "budget")
        panels[0].set_ylabel("step time over the fastest unlimited")
        panels[1].set_ylabel("peak over budget")
        for axes in panels:
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
        charts.save(drawing, path)


def _over_vdnn_plus(point: Point) -> Iterator[Comparison]:
    """Speed over vDNN+ and bytes against it, over the budgets in which both trained."""
    for rule in point.settings.get("rules", []):
        both = ((name, runs.VDNN_PLUS.format(rule, name)) for name in budgets_of(point))
        pairs = [(name, theirs) for name, theirs in both if point.has(theirs, STEP)]
        if not pairs:
            yield Comparison(claim("figure-12-all"), None, f"{point.at['network']}: no budget in which both trained")
            continue
        where = f"{point.at['network']}, {runs.VDNN_PLUS.format(rule, ', '.join(name for name, _ in pairs))}"
        ratios = [point.speedup(theirs, name, STEP).median for name, theirs in pairs]
        yield Comparison(claim("figure-12-all"), spread(ratios), where)
        ours, others = (sum(point.values(pair[side], MOVED)[0] for pair in pairs) for side in (0, 1))
        share = spread([100 * ours / others]) if others else None
        yield Comparison(target("moved-share"), share, f"{where}: {ours:.0f} MiB against {others:.0f} MiB in all")
