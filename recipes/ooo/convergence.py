"""`ooo_convergence`: the losses of training on real data, step by step, which must lie on each other bit by bit."""

from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.ooo.cases import of_case
from retime.recipes.ooo.cluster import OnRanks
from retime.recipes.ooo.settings import OutOfOrderSettings
from retime.recipes.ooo.variants import label


class Convergence(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a network with its data; every variant trains it for the same epochs."""

    quantity = "loss"

    def references(self, point: Point) -> dict[str, str]:
        return {}

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["case"])
        with self.network(case, case.hosts, case.rate) as network:
            answers = self.run_job(case, network, tick, "losses", batches=case.steps)
        found = answers[0]["variants"]
        rows = [Row(name, "loss", "nats", one["losses"]) for name, one in found.items()]
        same = [
            name
            for name in found
            if all(
                answer["variants"][name]["losses"] == answer["variants"]["ddp"]["losses"]
                and answer["variants"][name]["weights"] == answer["variants"]["ddp"]["weights"]
                for answer in answers
            )
        ]
        facts = {
            "losses and final weights bit-identical to ddp, on all ranks": ", ".join(same) or "none",
            "final loss": {name: one["losses"][-1] for name, one in found.items()},
            "k": {name: one["k"] for name, one in found.items() if one["k"] is not None},
        }
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name in point.variants("loss"):
                if name != "ddp":
                    what = f"{point.at['case']}: most that the loss of {label(name)} differs"
                    target = Target(what, "nats", 0.0, at_most=True)
                    lines.append(Comparison(target, spread([largest_difference(point, name)])))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            f"- {point.at['case']}: loss {point.values('ddp', 'loss')[0]:.3f} at the first step, "
            f"{point.values('ddp', 'loss')[-1]:.3f} after {len(point.values('ddp', 'loss'))} steps (rank 0)"
            for point in result.points
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.one_or_panels(titled(result), len(result.points))
        for axes, point in zip(panels, result.points, strict=True):
            for index, name in enumerate(point.variants("loss")):
                # the curves cover each other, so each is drawn thinner than the one before
                width = max(6 - 2 * index, 1)
                axes.plot(point.values(name, "loss"), color=charts.COLOURS[index], linewidth=width, label=label(name))
            axes.set_title(point.at["case"], fontsize=10)
            axes.set_xlabel("training step")
        panels[0].set_ylabel("loss (nats), rank 0")
        panels[0].legend(fontsize=8)
        charts.save(drawing, path)


def largest_difference(point: Point, name: str) -> float:
    """The most by which a variant's loss differs from that of `ddp` at any step, in nats."""
    pairs = zip(point.values("ddp", "loss"), point.values(name, "loss"), strict=True)
    return max(abs(plain - ours) for plain, ours in pairs)
