"""Figure 6 of BPPSA: LeNet-5 trained by plain back-propagation and by the scan, from the same weights on the same data.

`bppsa_convolutional_jacobians` has Table 1, `bppsa_convolutional_flops` Figure 10.
"""

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from retime.foundations.measure import spread
from retime.modules.scan_sequential import ScanSequential
from retime.recipes.bppsa.settings import ConvolutionalSettings
from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model, build_optimizer, loss_of
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, titled

Batch = tuple[Tensor, Tensor]
PLAIN, MOVED = "back-propagation", "back-propagation from weights moved by rounding"
CLOSE_NATS = 1e-9
"""In float64 the curves lie on each other: no loss differs by more."""
FEMTO = 1e-15


class Convergence(Recipe[ConvolutionalSettings]):
    """Training and test loss step by step; every variant starts from the same weights and sees the same batches.

    In float32 one variant shows what a difference means: back-propagation again, with every first weight moved by at
    most one rounding unit. A max-pooling whose two largest inputs are that close then picks the other one.
    """

    over = (("precision", "precisions"),)
    quantity = "training loss"

    def points(self, settings: ConvolutionalSettings) -> list[dict[str, Any]]:
        unknown = sorted(set(settings.precisions) - {"float32", "float64"})
        if unknown or not settings.precisions:
            raise ValueError(f"precisions={settings.precisions}: choose from float32, float64")
        if not settings.levels:
            raise ValueError("levels=[] leaves nothing to compare with: levels=[null] is the whole scan")
        return super().points(settings)

    def blocks(self, settings: ConvolutionalSettings) -> int | None:
        return settings.steps * (2 + len(settings.levels))

    def measure(self, settings: ConvolutionalSettings, at: dict[str, Any], tick: Tick) -> Measured:
        device, dtype = torch.device(settings.hardware.device), getattr(torch, at["precision"])
        start = build_model(settings.model, device, settings.seed)
        if not isinstance(start, nn.Sequential):
            raise ValueError(f"{type(start).__name__} is no nn.Sequential: the scan needs a chain of layers")
        inputs, targets = collated(build(settings.data, split="val"), device)
        rows: list[Row] = []
        facts: dict[str, Any] = {"data": build(settings.data).name, "batch size": settings.batch_size}
        facts["relative difference of the first gradient, float64"] = {
            scan_name(levels): first_difference(start, next(batches(settings, device)), levels)
            for levels in settings.levels
        }
        for name, model in variants(start.to(dtype), settings.levels).items():
            started = time.perf_counter()
            train_losses, test_losses = train(model, settings, (inputs.to(dtype), targets), partial(tick, name))
            facts[f"{name}: seconds of training"] = round(time.perf_counter() - started, 2)
            rows.append(Row(name, "training loss", "nats", train_losses))
            rows.append(Row(name, "test loss", "nats", test_losses))
            if isinstance(model, ScanSequential):
                facts[f"{name} reports"] = model.report().one_line
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            if point.at["precision"] != "float64":
                continue
            for name in scans(point):
                for quantity in ("training loss", "test loss"):
                    most = max(differences(point, name, quantity)) / FEMTO
                    what = f"float64: most that the {quantity} differs, {name}"
                    target = Target(what, "1e-15 nats", CLOSE_NATS / FEMTO, at_most=True)
                    lines.append(Comparison(target, spread([most])))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            losses, tests = point.values(PLAIN, "training loss"), point.values(PLAIN, "test loss")
            most = ", ".join(
                f"{name} {max(differences(point, name, 'training loss')):.1e}" for name in (*scans(point), MOVED)
            )
            first = point.facts["relative difference of the first gradient, float64"]
            lines.append(
                f"{point.at['precision']}, {point.facts['data']}: training loss {losses[0]:.3f} at the first step, "
                f"{losses[-1]:.3f} after {len(losses)}; test loss {tests[0]:.3f} and {tests[-1]:.3f}. Most that a "
                f"training loss differs from back-propagation's, in nats: {most}. First gradient, in float64: "
                + ", ".join(f"{name} {value:.1e}" for name, value in first.items())
                + "."
            )
        return [
            *lines,
            "Steps amplify rounding, so in float32 a scan is to be read against back-propagation from weights moved by "
            "one rounding unit, which is back-propagation too.",
            "Figure 6 of the paper is a picture without printed numbers: its statement is that the curves overlap. It "
            "trains on CIFAR-10 with batch 256, learning rate 0.001 and momentum 0.9; CIFAR-10 is taken from a folder: "
            "data={_target_: retime.recipes.data.cifar10, path: ...} model.in_channels=3.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        first = result.points[0]
        drawing, panels = charts.panels(
            titled(result, first.facts["data"]), 1 + len(result.points), width=4.5 + 4.5 * len(result.points)
        )
        names = [PLAIN, *scans(first)]
        for axes, point in zip(panels, result.points, strict=False):
            every = point.settings["evaluate_every"]
            for index, name in enumerate(names):
                # the curves cover each other, so each is drawn thinner than the one before
                style = {"color": charts.COLOURS[index], "linewidth": 5.0 / 3**index}
                axes.plot(point.values(name, "training loss"), label=f"{name}, training", **style)
                values = point.values(name, "test loss")
                places = [number * every for number in range(len(values))]
                axes.plot(places, values, linestyle="--", label=f"{name}, test", **style)
            axes.set_title(point.at["precision"], fontsize=10)
            axes.set_xlabel("training step")
        panels[0].set_ylabel("loss (nats)")
        panels[0].legend(fontsize=8)
        axes = panels[-1]
        for number, point in enumerate(result.points):
            for index, name in enumerate((*scans(point), MOVED), start=1):
                gaps = [max(gap, 1e-17) for gap in differences(point, name, "training loss")]
                style = {"color": charts.COLOURS[index], "linestyle": ("-", ":")[number % 2], "linewidth": 1}
                axes.plot(gaps, label=f"{point.at['precision']}: {name}", **style)
        axes.set_yscale("log")
        axes.set_title("training loss, difference from back-propagation", fontsize=10)
        axes.set_ylabel("nats (0 drawn as 1e-17)")
        axes.set_xlabel("training step")
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
        charts.save(drawing, path)


def scan_name(levels: int | None) -> str:
    """`scan, all levels`, or `scan, 2 levels`."""
    return "scan, all levels" if levels is None else f"scan, {levels} levels"


def scans(point: Point) -> list[str]:
    """The measured variants that scan."""
    return [name for name in point.variants("training loss") if name not in (PLAIN, MOVED)]


def variants(start: nn.Sequential, levels: list[int | None]) -> dict[str, nn.Module]:
    """A copy of `start` to train each way."""
    found: dict[str, nn.Module] = {PLAIN: copy.deepcopy(start), MOVED: copy.deepcopy(start)}
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in found[MOVED].parameters():
            units = torch.randint(-1, 2, weight.shape, generator=random).to(weight)
            weight.mul_(1 + units * torch.finfo(weight.dtype).eps)
    for each in levels:
        found[scan_name(each)] = ScanSequential.of(copy.deepcopy(start), each)
    return found


def collated(data: Any, device: torch.device) -> Batch:
    """All of a data set as one batch."""
    inputs, targets = default_collate([data[number] for number in range(len(data))])
    return inputs.to(device), targets.to(device)


def batches(settings: ConvolutionalSettings, device: torch.device) -> Iterator[Batch]:
    """Batches without end, in an order that depends on the seed alone; the last part of an epoch is left out."""
    data = build(settings.data)
    if len(data) < settings.batch_size:
        raise ValueError(f"batch_size={settings.batch_size}, but the data set has {len(data)} examples")
    random = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(len(data), generator=random)
        for rows in torch.split(order, settings.batch_size)[: len(data) // settings.batch_size]:
            inputs, targets = default_collate([data[int(row)] for row in rows])
            yield inputs.to(device), targets.to(device)


def train(
    model: nn.Module, settings: ConvolutionalSettings, test: Batch, tick: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Loss of every step, and the test loss before the first step and after every `evaluate_every` ones."""
    optimizer = build_optimizer(settings.optimizer, model.parameters(), {})
    train_losses: list[Tensor] = []
    test_losses = [test_loss(model, test)]
    for number, (inputs, targets) in enumerate(islice(batches(settings, test[0].device), settings.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs.to(test[0].dtype)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        train_losses.append(loss.detach())
        if number % settings.evaluate_every == 0:
            test_losses.append(test_loss(model, test))
        tick()
    return [float(loss) for loss in train_losses], test_losses


def test_loss(model: nn.Module, test: Batch) -> float:
    """Mean cross-entropy over the test split, in nats."""
    parts = zip(torch.split(test[0], 512), torch.split(test[1], 512), strict=True)
    with torch.no_grad():
        total = sum(float(loss_of(model(inputs), targets)) * len(targets) for inputs, targets in parts)
    return total / len(test[1])


def first_difference(start: nn.Sequential, batch: Batch, levels: int | None) -> float:
    """Relative difference of the first gradient from back-propagation's, in float64, on up to eight examples."""
    inputs, targets = batch[0][:8].double(), batch[1][:8]
    plain = copy.deepcopy(start).double()
    found = []
    for model in (plain, ScanSequential.of(plain, levels)):
        parts = torch.autograd.grad(loss_of(model(inputs), targets), list(model.parameters()))
        found.append(torch.cat([part.flatten() for part in parts]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def differences(point: Point, name: str, quantity: str) -> list[float]:
    """How much a variant's loss differs from back-propagation's, in nats, one number a step."""
    pairs = zip(point.values(PLAIN, quantity), point.values(name, quantity), strict=True)
    return [abs(plain - ours) for plain, ours in pairs]
