"""`make demo`: the same training twice, with the plain strategy and with ours, on real data. Speed, memory, result."""

import copy
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import default_collate

from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model
from retime.recipes.core.claims import amount, show
from retime.recipes.core.measure import interleave, spread
from retime.recipes.core.of_points import ratio, titled
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
    OURS: 'strategy="fused_optimizer"\nAdamW(fused=True)',
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
        table = Table(title=f"{data}: {count}{settings['batch_size']}, each way from the same weights")
        table.add_column("")
        for name in names:
            table.add_column(HEADINGS.get(name, name), justify="right", style="bold" if name == OURS else None)
        for heading, cells in self.lines(point).items():
            table.add_row(heading, *cells)
        console.print(table)
        for note in self.notes(result):
            console.print(note, highlight=False)

    def lines(self, point: Point) -> dict[str, list[str]]:
        """The demo's table: a heading a line, a cell a variant."""
        names = point.variants("step")
        losses = {name: point.facts[f"{name} losses"] for name in names}
        speeds = {name: [1e3 / ms for ms in point.values(name, "step")] for name in names}
        over = {name: ratio(point, PLAIN, name) for name in names}

        def single(quantity: str, unit: str) -> list[str]:
            return [amount(point.values(name, quantity)[0], unit) for name in names]

        return {
            "training steps a second": [show(spread(speeds[name]), "/s") for name in names],
            "speed": [show(found, "x") if found else "" for found in over.values()],
            "gradients alive": single("gradients alive", "MiB"),
            "loss of the last step": [f"{losses[name][-1]:.9f}" for name in names],
            "accuracy on held-out data": single("accuracy", "%"),
            "final weights (checksum)": [point.facts[f"{name} weights"][:12] for name in names],
        }

    def notes(self, result: Result) -> list[str]:
        (point,) = result.points
        if not identical(point):
            return ["The results differ: that is a bug, please report it with result.json."]
        return [
            "Identical result: every loss and every bit of the final weights are the same with the plain strategy and "
            "with ours, at the same optimizer kernel. (AdamW() rounds differently: it is another kernel.)",
            f"Gradients alive in the first step of ours: "
            f"{amount(point.values(OURS, 'gradients alive, first step')[0], 'MiB')}.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        names = point.variants("step")
        title = titled(result)
        drawing, (speed, memory, loss) = charts.panels(title, 3, height=4.2, width_ratios=[1, 1, 1.4])
        ticks = [HEADINGS.get(name, name).replace("strategy=", "").replace("\n", ",\n") for name in names]
        for axes, quantity, title in (
            (speed, "step", "training steps a second"),
            (memory, "gradients alive", "gradients alive (MiB)"),
        ):
            heights = [1e3 / v if quantity == "step" else v for v in self._medians(point, names, quantity)]
            bars = axes.bar(range(len(names)), heights, color=charts.COLOURS[: len(names)], width=0.65)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
            axes.margins(y=0.1)  # room for the numbers
            axes.set_xticks(range(len(names)), ticks, fontsize=7, rotation=20, ha="right", rotation_mode="anchor")
            axes.set_title(title, fontsize=10)
        for width, (index, name) in zip((4.5, 3.0, 1.2), enumerate(names), strict=False):
            losses = point.facts[f"{name} losses"]
            style = "--" if name == OURS else "-"
            tint = {"color": "black" if name == OURS else charts.COLOURS[index], "alpha": 1 if name == OURS else 0.5}
            text = HEADINGS.get(name, name).replace("\n", ", ")
            loss.plot(range(1, len(losses) + 1), losses, style, linewidth=width, label=text, **tint)
        loss.set_xlabel("step")
        loss.set_title("training loss", fontsize=10)
        loss.set_yscale("log")
        loss.set_ylabel("nats")
        loss.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
        charts.save(drawing, path)

    def _medians(self, point: Point, names: list[str], quantity: str) -> list[float]:
        return [spread(point.values(name, quantity)).median for name in names]


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
