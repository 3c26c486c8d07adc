"""BPPSA's convolutional networks in training: Figure 6, and Figure 10 after pruning.

Figure 6 (:class:`Convergence`): LeNet-5 trained by plain back-propagation and by the scan, from the same weights on the
same data. Figure 10 (:class:`PrunedFlops`): floating-point operations of each step of the scan over a pruned VGG-11, by
static analysis. `convolutional_jacobians` has Table 1 and Figure 5.
"""

import copy
import time
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.measure import spread
from retime.mechanisms.scan import (
    CsrPattern,
    count_flops,
    flop_of_vector,
    prune_class_blind,
    prune_class_uniform,
    scan_plan,
    transposed_jacobian,
)
from retime.modules.scan_sequential import ScanSequential
from retime.recipes.bppsa.settings import ConvolutionalSettings, claim
from retime.recipes.bppsa.training import Batch, accuracy, batches, test_split, train
from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model, loss_of
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, titled

PLAIN, MOVED = "back-propagation", "back-propagation from weights moved by rounding"
FEMTO = 1e-15


class Convergence(Recipe[ConvolutionalSettings]):
    """Training and test loss step by step; every variant starts from the same weights and sees the same batches.

    In float32 one variant shows what a difference means: back-propagation again, with every first weight moved by at
    most one rounding unit. A max-pooling whose two largest inputs are that close then picks the other one.
    """

    over = (("precision", "precisions"),)
    quantity = "training loss"
    curves = (("training loss", "steps"), ("test loss", "checks"))

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
        start = chain_of(settings, device)
        inputs, targets = test_split(settings, device)
        test, data = (inputs.to(dtype), targets), build(settings.data)
        first = next(batches(data, settings.batch_size, settings.seed, device))
        rows: list[Row] = []
        facts: dict[str, Any] = {"data": data.name, "batch size": settings.batch_size}
        facts["relative difference of the first gradient, float64"] = {
            scan_name(levels): first_difference(start, first, levels) for levels in settings.levels
        }
        for name, model in variants(start.to(dtype), settings.levels).items():
            started = time.perf_counter()
            train_losses: list[float] = []
            test_losses = [test_loss(model, test)]
            for number, loss in enumerate(train(model, settings, settings.steps), 1):
                train_losses.append(float(loss))
                if number % settings.evaluate_every == 0:
                    test_losses.append(test_loss(model, test))
                tick(name)
            facts[f"{name}: seconds of training"] = round(time.perf_counter() - started, 2)
            rows.append(Row(name, "training loss", "nats", train_losses))
            rows.append(Row(name, "test loss", "nats", test_losses))
            if isinstance(model, ScanSequential):
                facts[f"{name} reports"] = model.report().one_line
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in (point for point in result.points if point.at["precision"] == "float64"):
            for name, quantity in product(scans(point), ("training loss", "test loss")):
                what = f"float64: most that the {quantity} differs, {name}"
                target = Target(what, "1e-15 nats", 1e-9 / FEMTO, at_most=True)  # the curves lie on each other
                lines.append(Comparison(target, spread([max(differences(point, name, quantity)) / FEMTO])))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            losses, tests = point.values(PLAIN, "training loss"), point.values(PLAIN, "test loss")
            names, first = (*scans(point), MOVED), point.facts["relative difference of the first gradient, float64"]
            most = ", ".join(f"{name} {max(differences(point, name, 'training loss')):.1e}" for name in names)
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
            "'data={_target_: retime.recipes.data.cifar10, path: ...}' '~data.image_size' '~data.channels' "
            "model.in_channels=3.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        first = result.points[0]
        count = 1 + len(result.points)
        drawing, panels = charts.panels(titled(result, first.facts["data"]), count, width=4.5 * count)
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


def chain_of(settings: ConvolutionalSettings, device: torch.device) -> nn.Sequential:
    """The network with weights that depend on the seed alone; ValueError if it is no chain of layers."""
    model = build_model(settings.model, device, settings.seed)
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"{type(model).__name__} is no nn.Sequential: the scan needs a chain of layers")
    return model


def scan_name(levels: int | None) -> str:
    """`scan, all levels`, or `scan, 2 levels`."""
    return "scan, all levels" if levels is None else f"scan, {levels} levels"


def scans(point: Point) -> list[str]:
    """The measured variants that scan."""
    return [name for name in point.variants("training loss") if name not in (PLAIN, MOVED)]


def variants(start: nn.Sequential, levels: list[int | None]) -> dict[str, nn.Module]:
    """A copy of `start` to train each way."""
    models: dict[str, nn.Module] = {PLAIN: copy.deepcopy(start), MOVED: copy.deepcopy(start)}
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in models[MOVED].parameters():
            units = torch.randint(-1, 2, weight.shape, generator=random).to(weight)
            weight.mul_(1 + units * torch.finfo(weight.dtype).eps)
    for each in levels:
        models[scan_name(each)] = ScanSequential.of(copy.deepcopy(start), each)
    return models


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
    gradients = []
    for model in (plain, ScanSequential.of(plain, levels)):
        parts = torch.autograd.grad(loss_of(model(inputs), targets), list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def differences(point: Point, name: str, quantity: str) -> list[float]:
    """Differences of a variant's loss from back-propagation's, in nats, one number a step."""
    pairs = zip(point.values(PLAIN, quantity), point.values(name, quantity), strict=True)
    return [abs(plain - ours) for plain, ours in pairs]


PRUNINGS = {"class_blind": prune_class_blind, "class_uniform": prune_class_uniform}
ZEROS = ("of one image", "guaranteed")
SCAN, SPARSE, DENSE = "scan", "sparse back-propagation, pruned", "back-propagation, unpruned"
ACCURACIES = "test accuracy: trained, pruned, retrained"
CAVEAT = (
    "Caveat: the green circles, the paper's baseline, are operators of the network that is NOT pruned. "
    "Back-propagation one layer after another over the same sparse Jacobians of the pruned network needs {ratio:.0f} "
    "times fewer operations in all ({sparse:.1e}) than the scan's longest path ({critical:.1e})."
)


class PrunedFlops(CaseRecipe[ConvolutionalSettings]):
    """Trains for a while, prunes, retrains, and counts. `cases` say how to prune and which zeros count."""

    quantity = "FLOP in all"

    def points(self, settings: ConvolutionalSettings) -> list[dict[str, Any]]:
        for name, case in settings.cases.items():
            if case.get("pruning") not in PRUNINGS or case.get("zeros") not in ZEROS:
                raise ValueError(
                    f"cases.{name}={case}: pruning is one of {', '.join(PRUNINGS)}, zeros one of {', '.join(ZEROS)}"
                )
        return super().points(settings)

    def measure(self, settings: ConvolutionalSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["case"]]
        device = torch.device(settings.hardware.device)
        model = chain_of(settings, device)
        test = test_split(settings, device)
        image = test[0][:1]
        for _ in train(model, settings, settings.steps):
            tick("training")
        accuracies = [accuracy(model, test)]
        dense = [operator_flop(*layer) for layer in jacobians(model, image, "of one image")]
        # the last layer keeps its weights: class-blind pruning of a network that is trained briefly would take them all
        kept = PRUNINGS[case["pruning"]](model[:-1], settings.share)
        accuracies.append(accuracy(model, test))
        for _ in train(model, settings, settings.retrain_steps):
            tick("training")
        accuracies.append(accuracy(model, test))
        tick("counting")
        masks = [mask for name, mask in model.named_buffers() if name.endswith("weight_mask")]
        left = sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
        # the first layer's Jacobian leads to the input, which nobody differentiates by
        chain = [pattern for _, pattern in jacobians(model, image, case["zeros"])[:0:-1]]
        steps = count_flops(scan_plan(len(chain), case.get("levels", 2)), chain)
        sparse = [flop_of_vector(pattern) for pattern in chain]
        rows = []
        for name, flops, path in (
            (SCAN, [step.flop for step in steps], [step.flop for step in steps if step.critical]),
            (SPARSE, sparse, sparse),
            (DENSE, [flop for flop, _ in dense[1:]], [flop for flop, _ in dense[1:]]),
        ):
            numbers = {"FLOP in all": sum(flops), "longest path": sum(path), "worst step": max(flops)}
            rows += [Row(name, quantity, "FLOP", [float(number)]) for quantity, number in numbers.items()]
        facts = {
            "levels": case.get("levels", 2),
            "layers in the chain": len(chain),
            "steps on the longest path": sum(step.critical for step in steps),
            "weights kept a layer": {name: round(share, 4) for name, share in kept.items()},
            "weights pruned away %": round(100 * (1 - left), 3),
            ACCURACIES: [round(share, 4) for share in accuracies],
            "accuracy kept": round(accuracies[-1] / accuracies[0], 4) if accuracies[0] else 0.0,
            "scan: kind, FLOP, m*n*k, critical": [[s.kind, s.flop, s.dense_size, s.critical] for s in steps],
            "baseline: FLOP, m*n": [list(pair) for pair in dense[1:]],
            "sparse: FLOP, m*n": [[flop, p.rows * p.columns] for flop, p in zip(sparse, chain, strict=True)],
        }
        return Measured(rows, facts)

    def references(self, point: Any) -> dict[str, str]:
        return {"fewer operations than unpruned": DENSE, "fewer operations than sparse": SPARSE}

    def compare(self, result: Result) -> list[Comparison]:
        return [
            Comparison(claim("pruned"), spread([p.facts["weights pruned away %"]]), p.at["case"]) for p in result.points
        ]

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            worst, unpruned = (point.values(name, "worst step")[0] for name in (SCAN, DENSE))
            path = point.values(SCAN, "longest path")[0]
            critical = point.facts["steps on the longest path"]
            lines.append(
                f"{point.at['case']}: the scan's worst step needs {worst:.1e} operations, the worst operator of "
                f"unpruned back-propagation {unpruned:.1e}; its longest path has {critical} of "
                f"{len(point.facts['scan: kind, FLOP, m*n*k, critical'])} steps and {path:.1e} operations, against "
                f"{point.facts['layers in the chain']} steps one after another."
            )
            lines.append(caveat(point))
        lines.append(
            "The paper prints no numbers for this figure and trains 100 epochs on CIFAR-10 before and after pruning; "
            "which weights survive class-blind pruning, and so every count, depends on that training. Products into "
            "the slot that algorithm 1 overwrites on its line 9 are not counted, nor is the first convolution's "
            "Jacobian, which leads to the image."
        )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = max(2, len(result.points))
        trained, _, retrained = zip(*(point.facts[ACCURACIES] for point in result.points), strict=True)
        after = " and ".join(f"{100 * share:.1f} %" for share in retrained)
        more = f"test accuracy {100 * trained[0]:.1f} %, pruned and retrained {after}"
        drawing, panels = charts.panels(titled(result, more), count, width=6.2 * count, height=5.6, sharey=True)
        for axes, point in zip(panels, result.points, strict=False):
            for colour, kind in zip(charts.COLOURS, ("mm", "mv"), strict=False):
                for critical in (False, True):
                    steps = point.facts["scan: kind, FLOP, m*n*k, critical"]
                    some = [step for step in steps if (step[0], step[3]) == (kind, critical)]
                    face = colour if critical else "none"
                    name = f"scan, {kind}{', longest path' if critical else ''}"
                    places, heights = [size for _, _, size, _ in some], [flop for _, flop, _, _ in some]
                    axes.scatter(places, heights, facecolors=face, edgecolors=colour, label=name)
            for key, colour, marker, name in (
                ("baseline: FLOP, m*n", charts.COLOURS[2], "o", "the paper's baseline: NOT pruned"),
                ("sparse: FLOP, m*n", charts.GREY, "x", "back-propagation, pruned and sparse"),
            ):
                heights, places = ([pair[index] for pair in point.facts[key]] for index in (0, 1))
                style = {"color": colour} if marker == "x" else {"facecolors": "none", "edgecolors": colour}
                axes.scatter(places, heights, marker=marker, label=name, **style)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"{point.at['case']}\n{fill(caveat(point), 85, break_on_hyphens=False)}", fontsize=8)
            axes.set_xlabel("m * n * k of the step without sparsity")
        for axes in panels[len(result.points) :]:
            axes.set_visible(False)
        panels[0].set_ylabel("FLOP of the step")
        charts.legend_below(drawing, panels[0], 6)
        charts.save(drawing, path)


def jacobians(model: nn.Sequential, image: Tensor, zeros: str) -> list[tuple[nn.Module, CsrPattern]]:
    """Layers with their Jacobians, of the convolutional part: what comes before the first reshape or head."""
    chain = []
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.AdaptiveAvgPool2d | nn.Flatten | nn.Linear):
                break
            image, jacobian = transposed_jacobian(layer, image)
            pattern = jacobian.without_zeros() if zeros == "of one image" else jacobian.pattern
            chain.append((layer, pattern.to(torch.device("cpu"))))
    return chain


def operator_flop(layer: nn.Module, pattern: CsrPattern) -> tuple[int, int]:
    """Operations of back-propagation's own operator and m * n, as the paper's published analysis counts them.

    A convolution costs two operations a non-zero; a ReLU sets its d outputs to zero and passes some on; a max-pooling
    sets them to zero and passes one a window.
    """
    size = pattern.rows * pattern.columns
    if isinstance(layer, nn.Conv2d):
        return flop_of_vector(pattern), size
    return pattern.rows + pattern.entries, size


def caveat(point: Any) -> str:
    """The sentence without which the picture misleads."""
    sparse, critical = point.values(SPARSE, "FLOP in all")[0], point.values(SCAN, "longest path")[0]
    return CAVEAT.format(ratio=critical / sparse, sparse=sparse, critical=critical)
