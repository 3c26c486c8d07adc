"""Figure 5 of BPPSA: where transposed Jacobians are zero whatever the input is, and where for one input."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from torch import Tensor, nn

from retime.mechanisms.scan import transposed_jacobian
from retime.recipes.bppsa.convolutional_jacobians import operator
from retime.recipes.bppsa.settings import ConvolutionalSettings
from retime.recipes.core import charts
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Result, Row

STORED, NON_ZERO, ALL = "stored", "non-zero for one input", "whole matrix"
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
        counts = {STORED: stored, NON_ZERO: one, ALL: torch.ones_like(stored)}
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
    """Where autograd's transposed Jacobian of ``layer`` is not zero: ``(inputs, outputs)``."""
    jacobian: Tensor = torch.autograd.functional.jacobian(layer, inputs, vectorize=True)  # type: ignore[no-untyped-call]
    return jacobian.detach().reshape(-1, inputs.numel()).t() != 0
