"""Figure 9 of moDNN: what training takes when nothing leaves the device, and the least it can do with.

Counted on tensors without memory, so it is exact on any machine. The paper does not say what its ideal case counts. One
way to count meets every number its text gives; it is shown beside what torch's own step holds.
"""

from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from torch import nn

from retime.foundations.measure import spread
from retime.mechanisms.memory_budget import StepMemory
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.modnn.networks import in_place, network_of, separate_gradients, weight_gradients_pass
from retime.recipes.modnn.settings import MemorySettings, NetworkRecipe, claim
from retime.schedules.budget import BlockKind
from retime.schedules.modnn import all_blocks_bytes, lower_bound, lower_bound_offloading_weights

GB = 1e9
MEMORY = "memory"
IDEAL, PEAK = "ideal, nothing reused (as the paper's)", "ideal, memory reused (torch's step)"
EQ_7, EQ_7_GRADIENTS = "Eq. 7, weights stay (as the paper's)", "Eq. 7, gradients stay too"
LINEAR = "weights of linear layers (%)"
FLOOR, NO_WEIGHTS = "floor of the replay (torch's step)", "Eq. 7, weights offloaded too (as the paper's)"


class Floors(NetworkRecipe):
    """A point a network."""

    quantity = MEMORY
    on_cpu = "counts without a device"

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        network = network_of(at["network"], settings.cases[at["network"]], settings.optimizer, settings.seed)
        step = network.step()
        memory = StepMemory(step, (1, 2, network.batch_size))
        plain = memory.plain
        if plain is None:
            raise ValueError(f"{network.name} cannot be run dry: {memory.note}")
        graph = network.graph(plain)
        tick("task graph")
        as_paper = weight_gradients_pass(separate_gradients(in_place(graph)))
        eq_7, floor = lower_bound(as_paper), memory.floor
        sizes = {
            IDEAL: all_blocks_bytes(as_paper, network.batch_size),
            PEAK: plain.peak_bytes,
            EQ_7: eq_7.bytes,
            EQ_7_GRADIENTS: lower_bound(graph).bytes,
            FLOOR: floor.bytes,
            NO_WEIGHTS: lower_bound_offloading_weights(as_paper),
        }
        rows = [Row(name, MEMORY, "GB", [round(nbytes / GB, 4)]) for name, nbytes in sizes.items()]
        weights = graph.resident_bytes(1) - plain.bytes_by_kind[BlockKind.WEIGHT_GRADIENT]
        facts = {
            "batch size": network.batch_size,
            "weights GB": round(weights / GB, 4),
            LINEAR: _linear_percent(network.step(1).module),
            "of the floor, weights, gradients and the whole batch GB": round(floor.resident_bytes / GB, 4),
            "largest task of Eq. 7": f"{eq_7.task.split(' ', 1)[1]} of {eq_7.layer or 'the model'}",
            "at the floor": str(floor.task),
            "tasks": len(graph.tasks),
        }
        return Measured(rows, facts)

    def blocks(self, settings: MemorySettings) -> int | None:
        return 1

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for published, ours, torchs in (
            (claim("reduction"), (IDEAL, EQ_7), (PEAK, FLOOR)),
            (claim("reduction-weights"), (IDEAL, NO_WEIGHTS), (PEAK, NO_WEIGHTS)),
        ):
            for names, what in ((ours, "counted as the paper"), (torchs, f"{torchs[0]} over {torchs[1]}")):
                ratios = [_ratio(point, *names) for point in result.points]
                remark = f"{what}; geometric mean {amount(geometric_mean(ratios), 'x')}"
                lines.append(Comparison(published, spread([fmean(ratios)]), remark))
        deep = [point for point in result.points if point.at["network"] == "VGG-101"]
        for published, name in ((claim("vgg-101-ideal"), IDEAL), (claim("vgg-101-floor"), EQ_7)):
            lines += [Comparison(published, point.spread(name, MEMORY), "counted as the paper") for point in deep]
        for published, least_gb in ((claim("above-12-gb"), 12.0), (claim("above-24-gb"), 24.0)):
            for name in (IDEAL, PEAK):
                above = [p.at["network"] for p in result.points if p.values(name, MEMORY)[0] > least_gb]
                lines.append(Comparison(published, spread([len(above)]), f"{name}: {', '.join(above)}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Exact, on tensors without memory, single precision, 224x224 images, gradient descent without momentum "
            "(which would add the weights' bytes to every row but the last), no convolution workspace.",
            "Counted as the paper: the ideal case is every block at its own address: each layer's output and its "
            "gradient, weights and their gradients; activations, batch normalisation and dropout are computed in "
            "place, as the paper's layer is one task. This meets all that section 7.1 states of single networks "
            "(nearly 100 GB and 1.4 GB for VGG-101; five ideal cases above 12 GB, four of them above 24 GB), and the "
            "paper does not give the other heights in numbers.",
            "Eq. 7 as in the paper: weights stay, and a weight gradient is there only while its task runs. That is "
            "not enough to add up sub-batches, as section 5.1 has it: gradients have to stay, so 'Eq. 7, gradients "
            "stay too' is the bound of what is trained.",
            "torch's step gives memory back as soon as the last use is over, so its ideal is about half of the "
            "paper's, and the reduction with it. Of a layer with batch normalisation it keeps two outputs, where the "
            "paper keeps one.",
            "The replay's floor counts what the step really holds: parameters, gradients, the whole batch (the paper "
            "fetches it by sub-batches), saved storages one at a time, and where torch makes the gradient of a "
            "large linear layer before it adds it to the sum, that as well. Eq. 7 counts the batch by samples.",
            *_without_the_largest(result),
            "With batch normalisation one sample at a time means statistics of one sample; see batchnorm= of the "
            "strategy.",
        ]
        for point in result.points:
            largest = f"{point.facts['largest task of Eq. 7']}; replay: {point.facts['at the floor']}"
            lines.append(
                f"- {point.at['network']}: {amount(_ratio(point, IDEAL, EQ_7), 'x')} and with weights offloaded "
                f"{amount(_ratio(point, IDEAL, NO_WEIGHTS), 'x')} as the paper counts, "
                f"{amount(_ratio(point, PEAK, FLOOR), 'x')} for torch's step; largest task by Eq. 7: {largest}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, 2, width=12.5, height=4.8, sharey=True)
        rows = ((IDEAL, EQ_7, NO_WEIGHTS), (PEAK, EQ_7_GRADIENTS, FLOOR))
        for axes, title, names in zip(panels, ("counted as the paper", "torch's step"), rows, strict=True):
            bars(axes, result.points, names, MEMORY)
            axes.set_yscale("log")
            axes.set_title(title, fontsize=10)
            axes.set_ylim(top=axes.get_ylim()[1] * 6)
            axes.legend(fontsize=8, loc="upper left")
        panels[0].set_ylabel("GB, logarithmic")
        charts.save(drawing, path)


def _without_the_largest(result: Result) -> list[str]:
    if len(result.points) < 2:
        return []
    largest = max(result.points, key=lambda point: _ratio(point, IDEAL, EQ_7))
    rest = [point for point in result.points if point is not largest]
    means = [amount(fmean(_ratio(p, IDEAL, least) for p in rest), "x") for least in (EQ_7, NO_WEIGHTS)]
    return [
        f"The averages are mostly {largest.at['network']}, whose largest task is tiny beside its batch; without it "
        f"they are {means[0]} and {means[1]}. What the paper's average hides of this network is not in its text."
    ]


def bars(axes: Any, points: list[Point], names: tuple[str, ...], quantity: str, form: str = ".3g") -> None:
    """Grouped bars with their values: a group a point, a bar a name; a missing one is crossed."""
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        label: str | None = name
        for place, point in enumerate(points):
            where = place + (index - (len(names) - 1) / 2) * width
            if not point.has(name, quantity):
                cross(axes, where, index)
                continue
            value = point.values(name, quantity)[0]
            axes.bar(where, value, width * 0.92, color=charts.COLOURS[index], label=label)
            label = None
            axes.annotate(format(value, form), (where, value), ha="center", va="bottom", fontsize=6.5, rotation=90)
    axes.set_xticks(range(len(points)), [f"{p.at['network']}\n({p.facts['batch size']})" for p in points], fontsize=8)
    axes.grid(axis="x", visible=False)


def cross(axes: Any, place: float, index: int, points_beside: float = 0.0) -> None:
    """A cross on the axis, where a way does not fit, in that way's colour."""
    moved = {"xycoords": axes.get_xaxis_transform(), "xytext": (points_beside, 2), "textcoords": "offset points"}
    axes.annotate("x", (place, 0), ha="center", fontsize=8, color=charts.COLOURS[index], **moved)


def _linear_percent(model: nn.Module) -> float:
    linear = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return round(100 * linear / sum(parameter.numel() for parameter in model.parameters()), 2)


def _ratio(point: Point, above: str, below: str) -> float:
    return point.values(above, MEMORY)[0] / point.values(below, MEMORY)[0]
