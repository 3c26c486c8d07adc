"""`make demo`: the same training twice, with the plain strategy and with ours, on real data. Speed, memory, result."""

import copy
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import default_collate

from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model
from retime.recipes.core.claims import amount
from retime.recipes.core.measure import Spread, interleave, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import FusionSettings
from retime.recipes.core.trainer_loop import Batch, Training, train
from retime.recipes.fusion.trainer import trainer_run
from retime.recipes.models import parameter_count

MIB = 2**20
PLAIN, OURS = "fused", "retime_backward"
HEADINGS = {
    "baseline": "plain strategy\nAdamW()",
    PLAIN: "plain strategy\nAdamW(fused=True)",
    OURS: '"fused_optimizer"\nAdamW(fused=True)',
}


class ResidualLayer(nn.Module):
    """x + relu(W norm(x)): keeps a deep network of linear layers trainable."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """`(B, width)` to the same shape."""
        return inputs + torch.relu(self.linear(self.norm(inputs)))


def residual_mlp(depth: int = 12, width: int = 1024, in_features: int = 64, num_classes: int = 10) -> nn.Sequential:
    """A linear layer, `depth` residual ones and a last one: enough parameters for their updates to cost time.

    Input `(B, ...)` with `in_features` numbers a sample, output logits `(B, num_classes)`.
    """
    layers = [ResidualLayer(width) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, width), *layers, nn.Linear(width, num_classes))


class Demo(Recipe[FusionSettings]):
    """Trains each variant from the same weights on the same batches, round by round, through Lightning's Trainer."""

    def points(self, settings: FusionSettings) -> list[dict[str, Any]]:
        return [{}]

    def blocks(self, settings: FusionSettings) -> int | None:
        return len(settings.variants) * (settings.rounds + settings.warmup_rounds + 1)

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        assert settings.batch_size is not None
        device = settings.hardware.device
        start = build_model(settings.model, torch.device("cpu"), settings.seed)
        batches = epochs_of_batches(settings, settings.epochs)
        inputs, targets = default_collate(list(build({**settings.data, "split": "val"})))

        def fit(variant: str, some: list[Batch], **options: Any) -> Training:
            return train(trainer_run(variant), copy.deepcopy(start), some, settings.optimizer, device=device, **options)

        last: dict[str, Training] = {}

        def block(variant: str) -> float:
            last[variant] = fit(variant, batches)
            return statistics.median(last[variant].step_ms)

        blocks = {name: partial(block, name) for name in settings.variants}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        rows: list[Row] = []
        facts: dict[str, Any] = {"parameters": parameter_count(start), "steps": len(batches)}
        for name, step_ms in times.items():
            counted = fit(name, batches[:4], count_gradients=True)
            tick(f"{name} memory")
            rows.append(Row(name, "step", "ms", [round(value, 5) for value in step_ms]))
            rows.append(Row(name, "gradients alive", "MiB", [counted.peak_gradient_bytes / MIB]))
            rows.append(Row(name, "gradients alive, first step", "MiB", [counted.first_peak_gradient_bytes / MIB]))
            done = last[name]
            rows.append(Row(name, "accuracy", "%", [100 * accuracy(done.module, inputs, targets)]))
            facts[f"{name} losses"] = done.losses
            facts[f"{name} weights"] = done.weights
            facts[f"{name} strategy"] = done.strategy
        return Measured(rows, facts)

    def show(self, result: Result, console: Console) -> None:
        (point,) = result.points
        names = point.variants("step")
        settings = point.settings
        count = f"{point.facts['parameters'] / 1e6:.1f} M parameters, {point.facts['steps']} steps of batch "
        data = settings["data"]["_target_"].rsplit(".", 1)[-1]
        title = f"{data}: {count}{settings['batch_size']}, each way from the same weights"
        console.print(title, highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns hold it
        table.add_column("strategy\noptimizer", no_wrap=True)
        for name in names:
            heading = HEADINGS.get(name, name)
            table.add_column(heading, justify="right", style="bold" if name == OURS else None, no_wrap=True)
        for heading, cells in self.lines(point).items():
            table.add_row(heading, *cells)
        console.print(table)
        for note in self.notes(result):
            console.print(note, highlight=False)

    def lines(self, point: Point) -> dict[str, list[str]]:
        """The demo's table: a heading a line, a cell a variant."""
        names = point.variants("step")
        rates = _rates(point)
        losses = {name: point.facts[f"{name} losses"] for name in names}

        def single(quantity: str, unit: str) -> list[str]:
            return [amount(point.values(name, quantity)[0], unit) for name in names]

        return {
            "steps a second": [f"{rate.median:.2f}" for rate in rates.values()],
            "  its quartiles": [f"{rate.low:.2f} to {rate.high:.2f}" for rate in rates.values()],
            "speed": [f"{rate.median / rates[PLAIN].median:.2f} x" for rate in rates.values()],
            "gradients alive": single("gradients alive", "MiB"),
            "held-out accuracy": single("accuracy", "%"),
            "last loss": [f"{losses[name][-1]:.9f}" for name in names],
            "losses differ by": ["" if name == PLAIN else f"{_difference(point, name):.2g}" for name in names],
            "weights' checksum": [point.facts[f"{name} weights"][:12] for name in names],
        }

    def notes(self, result: Result) -> list[str]:
        (point,) = result.points
        if not identical(point):
            return ["The results differ: that is a bug, please report it with result.json."]
        rates, steps = _rates(point), point.facts["steps"]
        plain, ours = (amount(point.values(name, "gradients alive")[0], "MiB") for name in (PLAIN, OURS))
        return [
            f'Same result: over {steps} steps the losses of "fused_optimizer" and of the plain strategy with the same '
            "AdamW(fused=True) differ by at most 0, and all bits of the final weights are equal. (AdamW() runs another "
            "kernel.)",
            f"It took {rates[OURS].median / rates[PLAIN].median:.2f} times as many steps a second, with at most "
            f"{ours} of gradients alive at once instead of {plain}.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        names = point.variants("step")
        drawing, (speed, memory, loss) = charts.panels(titled(result), 3, height=3.4, width_ratios=[1, 1, 1.3])
        memories = {name: spread(point.values(name, "gradients alive")) for name in names}
        for axes, bars, title, form in (
            (speed, _rates(point), "training steps a second", "%.1f"),
            (memory, memories, "gradients alive at once, MiB", "%.1f"),
        ):
            medians = [bar.median for bar in bars.values()]
            whiskers = [
                [bar.median - bar.low for bar in bars.values()],
                [bar.high - bar.median for bar in bars.values()],
            ]
            options = {"xerr": whiskers, "ecolor": charts.GREY, "capsize": 3} if axes is speed else {}
            drawn = axes.barh(range(len(names)), medians, color=charts.COLOURS[: len(names)], height=0.65, **options)
            axes.bar_label(drawn, fmt=form, fontsize=8, padding=3)
            axes.margins(x=0.2)  # room for the numbers
            axes.set_yticks(range(len(names)), [HEADINGS.get(name, name) for name in names], fontsize=8)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_title(title, fontsize=10)
        memory.set_yticklabels([])
        for name, style, width in ((PLAIN, "-", 3.0), (OURS, "--", 1.2)):
            losses = point.facts[f"{name} losses"]
            colour = "black" if name == OURS else charts.COLOURS[names.index(name)]
            text = HEADINGS[name].replace("\n", ", ")
            loss.plot(range(1, len(losses) + 1), losses, style, linewidth=width, label=text, color=colour)
        loss.set_xlabel("step")
        loss.set_title(f"training loss: the largest difference is {_difference(point, OURS):.2g}", fontsize=10)
        loss.set_yscale("log")
        loss.set_ylabel("nats")
        loss.set_ylim(top=50 * max(point.facts[f"{PLAIN} losses"]))  # room for the legend
        loss.legend(fontsize=8, loc="upper right", frameon=False)
        charts.save(drawing, path)


def _rates(point: Point) -> dict[str, Spread]:
    """Training steps a second of each variant."""
    return {name: spread([1e3 / ms for ms in point.values(name, "step")]) for name in point.variants("step")}


def _difference(point: Point, name: str) -> float:
    """The largest difference, over all steps, between a variant's loss and the plain strategy's."""
    pairs = zip(point.facts[f"{name} losses"], point.facts[f"{PLAIN} losses"], strict=True)
    return float(max(abs(loss - plain) for loss, plain in pairs))


def identical(point: Point) -> bool:
    """Whether ours ended with the plain strategy's weights, bit by bit, and went through the same losses."""
    return all(point.facts[f"{PLAIN} {what}"] == point.facts[f"{OURS} {what}"] for what in ("weights", "losses"))


def epochs_of_batches(settings: FusionSettings, epochs: int) -> list[Batch]:
    """All batches of all epochs, shuffled anew in each, the same for every variant. The last short one is left out."""
    assert settings.batch_size is not None
    data = build({**settings.data, "split": "train"})
    random = torch.Generator().manual_seed(settings.seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=random).tolist()
        for first in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            numbers = order[first : first + settings.batch_size]
            batches.append(default_collate([data[number] for number in numbers]))
    device = torch.device(settings.hardware.device)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Share of right answers, 0 to 1."""
    model.eval()
    device = next(model.parameters()).device
    return float((model(inputs.to(device)).argmax(-1) == targets.to(device)).float().mean())
