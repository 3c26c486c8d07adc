"""What a rank's memory holds: `cpuacc_memory` for sums and images, `cpuacc_update` for the optimizer's state.

Sums: what each way to add gradients up takes of a rank, and how many images fit in what it saves. The paper's gradients
were accumulated in buffers on the devices, which the host's take the place of. Ranks on cores have one memory: here it
is what gloo and DDP keep beside the gradients against a ring that all ranks share.

State: once a machine against once a rank, and what a step takes. moDNN, section 6.2 (Chen et al. 2019), where the host
applies the update. On processors the ranks of a machine divide it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import OnRanks, ask, claim, machine, place, target
from retime.recipes.cpuacc.worker import GROWN, PEAK, STATE, STEP

MIB = 2**20


class FreshStarts(OnRanks):
    """A round is a start of fresh processes, of which that with most counts."""

    answers: tuple[tuple[str, str, str], ...]
    """A quantity, what a rank answers for it, and the unit."""

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        images = {"batch_size": at["images"]} if "images" in at else {}

        def start(label: str) -> list[dict[str, Any]]:
            variant = settings.variants[label]
            own = {"optimizer": variant["optimizer"]} if "optimizer" in variant else {}
            strategy = {key: value for key, value in variant.items() if key != "optimizer"}
            return ask(settings, at, tick, "held", strategy=strategy, **own, **images)

        starts = interleave({label: partial(start, label) for label in settings.variants}, settings.rounds, 0, tick)
        rows, weights = list[Row](), dict[str, set[str]]()
        for label, answers in starts.items():
            for quantity, name, unit in self.answers:
                over = MIB if unit == "MiB" else 1
                most = [round(max(answer[name] for answer in ranks) / over, 4) for ranks in answers]
                rows.append(Row(label, quantity, unit, most))
            weights[label] = {answer["weights"] for ranks in answers for answer in ranks}
        *_, ours = starts
        same = [label for label, digests in weights.items() if digests == weights[ours] and len(digests) == 1]
        parameters = starts[ours][0][0]["parameters"]
        facts = {"parameters' bytes": parameters, "the same final weights": same, **machine(settings, at["ranks"])}
        return Measured(rows, facts)


class Memory(FreshStarts):
    """A point a network, number of ranks and batch size."""

    over = (*OnRanks.over, ("images", "batch_sizes"))
    quantity = GROWN
    answers = ((GROWN, PEAK, "MiB"),)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for few, many in _pairs(result):
            for label in few.variants(GROWN):
                if label.startswith("cpu_accumulate"):
                    theirs = label.replace("cpu_accumulate_ddp", "ddp")
                    note = f"{place(few)}, {many.at['images']} images: {label} over {theirs}"
                    lines.append(Comparison(claim("images"), more_images(few, many, label, theirs), note))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "A value is by how much the largest rank's process grew at its peak in a short fit, over what it was "
            "before the network was built (on a GPU what the rank has allocated there); each is a fresh start of all "
            "ranks. What an image takes is the difference between the two batch sizes over their distance; what a way "
            "saves of the other's memory at the larger batch is given to more images."
        ]
        for few, many in _pairs(result):
            mib = many.facts["parameters' bytes"] / MIB
            images = ", ".join(f"{label} {image_mib(few, many, label):.2f}" for label in few.variants(GROWN))
            lines.append(f"- {place(few)}, {mib:.0f} MiB of parameters: MiB an image: {images}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=4.2 * count, height=4.8, sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            first, *_ = labels = point.variants(GROWN)
            plain = point.values(first, GROWN)
            more = {
                label: spread([ours - theirs for ours, theirs in zip(point.values(label, GROWN), plain, strict=True)])
                for label in labels
            }
            charts.named(axes, more)
            where = f"{place(point)}, {point.at['images']} images"
            axes.set_title(f"{where}\n0: {first} with {spread(plain).median:.0f} MiB", fontsize=9)
            axes.axhline(0, color=charts.GREY, linewidth=1, linestyle="--")
        panels[0].set_ylabel("a rank grows by more (MiB)")
        charts.save(drawing, path)


def image_mib(few: Point, many: Point, label: str) -> float:
    """Memory that an image more takes."""
    more = many.median(label, GROWN) - few.median(label, GROWN)
    return more / float(many.at["images"] - few.at["images"])


def more_images(few: Point, many: Point, ours: str, theirs: str) -> Spread:
    """Images that fit our way in what theirs takes at the larger batch, over that batch."""
    saved = [one - other for one, other in zip(many.values(theirs, GROWN), many.values(ours, GROWN), strict=True)]
    return spread([1 + mib / image_mib(few, many, ours) / many.at["images"] for mib in saved])


def _pairs(result: Result) -> list[tuple[Point, Point]]:
    """The points of the smallest and the largest batch, of each network and number of ranks."""
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in result.points:
        groups.setdefault((point.at["network"], point.at["ranks"]), []).append(point)
    ordered = [sorted(points, key=lambda point: int(point.at["images"])) for points in groups.values()]
    return [(points[0], points[-1]) for points in ordered if len(points) > 1]


ZERO = "ddp, ZeroRedundancyOptimizer"
"""torch's own way to divide the state, a strong peer: each rank updates its part and broadcasts the weights."""


class Updates(FreshStarts):
    """A point a network and number of ranks."""

    quantity = STEP
    answers = ((STATE, STATE, "MiB"), (GROWN, GROWN, "MiB"), (STEP, STEP, "ms"))
    on_cpu = "divides updates among processors"

    def references(self, point: Point) -> dict[str, str]:
        first = point.variants(STEP)[0]
        return {f"speed over {first}": first}

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            theirs, *_, ours = point.variants(STEP)
            share = [one / point.at["ranks"] for one in point.values(theirs, STATE)]
            ratios = {
                "share": speedup(point.values(ours, STATE), share),
                "memory": point.speedup(ours, theirs, GROWN),
                "speed": point.speedup(theirs, ours, STEP),
            }
            if point.has(ZERO, STEP):
                ratios["zero-memory"] = point.speedup(ours, ZERO, GROWN)
                ratios["zero-speed"] = point.speedup(ZERO, ours, STEP)
            where = f"{place(point)}: {ours} over {theirs}"
            lines += [Comparison(target(name), ratio, where) for name, ratio in ratios.items()]
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Values are those of the rank with most; a start is a fresh start of all ranks. Memory is what a process "
            "grew by until the end of a step, over what it was before the network was built. When the fit ends every "
            "rank gets the whole state again, which is not in it. On more than two ranks gloo adds up in another order."
        ]
        for point in result.points:
            mib = point.facts["parameters' bytes"] / MIB
            lines.append(
                f"- {place(point)} on {point.facts['cores']} cores: {mib:.0f} MiB of parameters; the same final "
                f"weights: {', '.join(point.facts['the same final weights'])}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        quantities = ((STATE, "optimizer state of a rank (MiB)"), (GROWN, "a rank grows by (MiB)"), (STEP, "step (ms)"))
        places = [(point, *quantity) for point in result.points for quantity in quantities]
        rows = len(result.points)
        drawing, panels = charts.panels(titled(result), len(places), width=10.5, height=4.2 * rows, rows=rows)
        for axes, (point, quantity, text) in zip(panels, places, strict=True):
            values = {label: point.values(label, quantity) for label in point.variants(quantity)}
            charts.named(axes, {label: spread(kept) for label, kept in values.items()})
            axes.set_ylim(0, 1.1 * max(map(max, values.values())))
            axes.set_title(place(point), fontsize=9)
            axes.set_ylabel(text)
        charts.save(drawing, path)
