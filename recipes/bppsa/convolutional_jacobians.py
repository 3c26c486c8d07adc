"""Transposed Jacobians of convolutional layers: Table 1 of BPPSA, and Figure 5.

Table 1 (:class:`Generation`): how sparse they are, and what generating one costs against two baselines. Section 3.4
names both: one column at a time by automatic differentiation, and one at a time numerically. Figure 5
(:class:`Patterns`): where they are zero whatever the input is, and where for one input.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from torch import Tensor, nn

from retime.foundations.measure import spread
from retime.mechanisms.scan import jacobian_of, transposed_jacobian
from retime.recipes.bppsa.settings import ConvolutionalSettings, claim
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.measure import PhaseClock, interleave
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, ratio, titled

VALUES, ALL = "values", "pattern and values"
AUTOGRAD, NUMERICAL = "autograd, all columns", "finite differences, all columns"
DIFFERENCE = 1e-3
"""Step of the finite differences."""
OPERATORS = ("convolution", "relu", "max_pool")


class Generation(Recipe[ConvolutionalSettings]):
    """The first convolution, ReLU and max-pooling of VGG-11, one image."""

    over = (("operator", "operators"),)

    def points(self, settings: ConvolutionalSettings) -> list[dict[str, Any]]:
        if not settings.operators or not set(settings.operators) <= set(OPERATORS):
            raise ValueError(f"operators={settings.operators}: choose from {', '.join(OPERATORS)}")
        return super().points(settings)

    def turns(self, settings: ConvolutionalSettings) -> int | None:
        return 4

    def measure(self, settings: ConvolutionalSettings, at: dict[str, Any], tick: Tick) -> Measured:
        device = torch.device(settings.hardware.device)
        layer, inputs = operator(at["operator"], settings, device)
        jacobian = jacobian_of(layer, inputs.shape[1:], device)
        outputs, saved = jacobian.run(layer, inputs)
        calls: dict[str, tuple[Callable[[], object], float]] = {
            VALUES: (partial(jacobian.values, *saved), 1.0),
            ALL: (partial(transposed_jacobian, layer, inputs), 1.0),
            AUTOGRAD: (partial(autograd_columns, layer, inputs, settings.columns), outputs.numel() / settings.columns),
            NUMERICAL: (partial(numerical_columns, layer, inputs, settings.columns), inputs.numel() / settings.columns),
        }
        clock = PhaseClock(device)

        def timed(call: Callable[[], object], scale: float) -> float:
            clock.start()
            call()
            clock.mark()
            return clock.steps_ms()[0][0] * scale

        blocks = {name: partial(timed, *call) for name, call in calls.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        transposed = transposed_jacobian(layer, inputs)[1]
        expected = autograd_columns(layer, inputs, settings.columns)
        ours = torch.zeros_like(expected)
        for index, number in enumerate(some(settings.columns, outputs.numel())):
            here = transposed.pattern.indices == number
            ours[transposed.pattern.row_of[here], index] = transposed.values[here, 0].detach()
        facts = {
            "transposed Jacobian": f"{transposed.pattern.rows} x {transposed.pattern.columns}",
            "entries": transposed.pattern.entries,
            "sparsity": transposed.pattern.sparsity,
            "non-zeros of this image": transposed.without_zeros().entries,
            "full matrix MiB": round(4 * transposed.pattern.rows * transposed.pattern.columns / 2**20, 2),
            "CSR values MiB": round(4 * transposed.pattern.entries / 2**20, 2),
            "columns that the baselines computed": settings.columns,
            "largest difference from autograd's columns": float((ours - expected).abs().max()),
        }
        return Measured([Row(name, "step", "ms", values) for name, values in times.items()], facts)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over autograd": AUTOGRAD, "speed over finite differences": NUMERICAL}

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            name, share = point.at["operator"].replace("_", "-"), point.facts["sparsity"]
            sparsity, generation = claim(f"sparsity-{name}"), claim(f"generation-{name}")
            note = f"sparsity {share:.6f}, the paper's {1 - sparsity.value / 1e6:.5f}"
            lines.append(Comparison(sparsity, spread([1e6 * (1 - share)]), note))
            both = "pattern built again each time, as the paper's routine does"
            lines.append(Comparison(generation, ratio(point, AUTOGRAD, ALL), both))
            once = "pattern built once, values an iteration"
            lines.append(Comparison(generation, ratio(point, AUTOGRAD, VALUES), once))
            if name == "convolution":
                lines.append(Comparison(claim("dense"), spread([point.facts["full matrix MiB"]])))
                lines.append(Comparison(claim("csr"), spread([point.facts["CSR values MiB"]])))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "The paper's expression 1 - h_f w_f / (h_i w_i) for the convolution neglects the padding; its 0.99157 is "
            "the exact count, 1 - 192 * 94^2 / (3072 * 65536): 192 pairs of channels, and of 96 rows of taps 94 lie "
            "on the image.",
            "The baselines compute the stated number of columns; the time of all columns is that time scaled. Finite "
            "differences give a Jacobian by columns of inputs, which are the rows of the transposed one.",
            "The paper's max-pooling routine (appendix D.3) stores one entry an output, at a place that changes with "
            "the image. Ours keeps all places that can be non-zero, as Table 1 counts them, so that the pattern, and "
            "every product planned with it, serves all iterations.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result))
        names = [VALUES, ALL, NUMERICAL, AUTOGRAD]
        for index, name in enumerate(names):
            places = [position + 0.2 * (index - 1.5) for position in range(len(result.points))]
            heights = [point.median(name, "step") for point in result.points]
            axes.bar(places, heights, 0.19, color=charts.COLOURS[index], label=name)
        axes.set_yscale("log")
        labels = [f"{p.at['operator']}\nsparsity {p.facts['sparsity']:.5f}" for p in result.points]
        axes.set_xticks(range(len(result.points)), labels)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("generating the transposed Jacobian (ms)")
        axes.legend(fontsize=8, ncols=2)
        axes.margins(y=0.3)
        charts.save(drawing, path)


def operator(name: str, settings: ConvolutionalSettings, device: torch.device) -> tuple[nn.Module, Tensor]:
    """One of VGG-11's first three layers, and an input ``(1, C, H, H)`` for it."""
    torch.manual_seed(settings.seed)
    size, channels = settings.image_size, settings.channels
    image = torch.randn(1, 3, size, size, device=device)
    convolution = nn.Conv2d(3, channels, 3, padding=1).to(device)
    if name == "convolution":
        return convolution, image
    inside = convolution(image).detach()
    return (nn.ReLU(), inside) if name == "relu" else (nn.MaxPool2d(2), inside.relu())


def some(count: int, of: int) -> list[int]:
    """`count` numbers spread evenly over 0 .. of - 1."""
    return [int(number) for number in torch.linspace(0, of - 1, count)]


def autograd_columns(layer: nn.Module, inputs: Tensor, count: int) -> Tensor:
    """``(inputs, count)``: columns of the transposed Jacobian, each by one backward pass."""
    leaf = inputs.detach().requires_grad_()
    outputs = layer(leaf)
    columns = []
    for number in some(count, outputs.numel()):
        picked = torch.zeros_like(outputs)
        picked.view(-1)[number] = 1
        columns.append(torch.autograd.grad(outputs, leaf, picked, retain_graph=True)[0].flatten())
    return torch.stack(columns, dim=1)


def numerical_columns(layer: nn.Module, inputs: Tensor, count: int) -> Tensor:
    """``(outputs, count)``: columns of the Jacobian, each by one forward pass and a difference."""
    with torch.no_grad():
        before = layer(inputs)
        columns = []
        for number in some(count, inputs.numel()):
            moved = inputs.clone()
            moved.view(-1)[number] += DIFFERENCE
            columns.append(((layer(moved) - before) / DIFFERENCE).flatten())
    return torch.stack(columns, dim=1)


STORED, NON_ZERO, WHOLE = "stored", "non-zero for one input", "whole matrix"
PLACES, OTHERS = "places", "places that autograd sees otherwise"
_COLOURS = {"guaranteed zeros": "#440154", "possible zeros": "#21d0d0", "non-zeros": "#fde725"}  # as in the paper


class Patterns(Recipe[ConvolutionalSettings]):
    """A point an operator, small enough to see single places; `rounds` random inputs are held against its pattern."""

    over = (("operator", "operators"),)
    quantity = PLACES

    def measure(self, settings: ConvolutionalSettings, at: dict[str, Any], tick: Tick) -> Measured:
        layer, inputs = operator(at["operator"], settings, torch.device(settings.hardware.device))
        pattern = transposed_jacobian(layer, inputs)[1].pattern
        stored = torch.zeros(pattern.rows, pattern.columns, dtype=torch.bool)
        stored[pattern.row_of, pattern.indices] = True
        one = non_zeros(layer, inputs)
        ever = one.clone()
        for _ in range(settings.rounds):
            ever |= non_zeros(layer, torch.randn_like(inputs))
        counts = {STORED: stored, NON_ZERO: one, WHOLE: torch.ones_like(stored)}
        facts = {
            "rows": pattern.rows,
            "columns": pattern.columns,
            "guaranteed zeros": round(1 - float(stored.float().mean()), 5),
            "inputs": settings.rounds + 1,
            OTHERS: int((stored ^ ever).sum()),
            "row, column, non-zero": [
                [row, column, bool(one[row, column])]
                for row, column in zip(pattern.row_of.tolist(), pattern.indices.tolist(), strict=True)
            ],
        }
        return Measured([Row(name, PLACES, PLACES, [int(each.sum())]) for name, each in counts.items()], facts)

    def notes(self, result: Result) -> list[str]:
        return [
            "Rows are inputs, columns outputs, both of one image, channel by channel. Each pattern was held against "
            "autograd's Jacobians of several random inputs: a place is stored if and only if one of them is not zero.",
            *(
                f"- {point.at['operator']}: {point.facts['rows']} x {point.facts['columns']}, "
                f"{100 * point.facts['guaranteed zeros']:.1f} % guaranteed zeros; {point.facts[OTHERS]} places differ "
                f"over {point.facts['inputs']} inputs"
                for point in result.points
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, len(result.points), width=3.5 * len(result.points), height=4.6)
        for axes, point in zip(panels, result.points, strict=True):
            cells = torch.zeros(point.facts["rows"], point.facts["columns"], dtype=torch.int64)
            for row, column, non_zero in point.facts["row, column, non-zero"]:
                cells[row, column] = 1 + non_zero
            shown = ListedColormap([*_COLOURS.values()])
            axes.imshow(cells.numpy(), cmap=shown, vmin=0, vmax=2, interpolation="nearest")
            axes.set_title(f"{point.at['operator'].replace('_', '-')}, {tuple(cells.shape)}", fontsize=10)
            axes.set_xlabel("output")
            axes.grid(visible=False)
        panels[0].set_ylabel("input")
        keys = [charts.colour_key(*key) for key in _COLOURS.items()]
        drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=3)
        charts.save(drawing, path)


def non_zeros(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Mask of the non-zeros in autograd's transposed Jacobian of ``layer``: ``(inputs, outputs)``."""
    jacobian: Tensor = torch.autograd.functional.jacobian(layer, inputs, vectorize=True)  # type: ignore[no-untyped-call]
    return jacobian.detach().reshape(-1, inputs.numel()).t() != 0
