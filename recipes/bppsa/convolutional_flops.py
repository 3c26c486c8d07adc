"""Figure 10 of BPPSA: floating-point operations of each step of the scan over a pruned VGG-11, by static analysis."""

from itertools import islice
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
from retime.recipes.bppsa.claims import claim
from retime.recipes.bppsa.convolutional import batches, collated
from retime.recipes.bppsa.settings import ConvolutionalSettings
from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model, build_optimizer, loss_of
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Result, Row, titled

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
        model = build_model(settings.model, device, settings.seed)
        if not isinstance(model, nn.Sequential):
            raise ValueError(f"{type(model).__name__} is no nn.Sequential: the scan needs a chain of layers")
        test = collated(build(settings.data, split="val"), device)
        image = test[0][:1]
        steps_of(model, settings, settings.steps, device, tick)
        accuracies = [accuracy(model, test)]
        dense = [operator_flop(*layer) for layer in jacobians(model, image, "of one image")]
        # the last layer keeps its weights: class-blind pruning of a network that is trained briefly would take them all
        kept = PRUNINGS[case["pruning"]](model[:-1], settings.share)
        accuracies.append(accuracy(model, test))
        steps_of(model, settings, settings.retrain_steps, device, tick)
        accuracies.append(accuracy(model, test))
        tick("counting")
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
            "weights pruned away %": round(100 * pruned_share(model), 3),
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


def steps_of(model: nn.Module, settings: ConvolutionalSettings, count: int, device: torch.device, tick: Tick) -> None:
    """Train for `count` steps."""
    optimizer = build_optimizer(settings.optimizer, model.parameters(), {})
    model.train()
    for inputs, targets in islice(batches(settings, device), count):
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tick("training")


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Share of the test split that the model, put into evaluation, names right."""
    with torch.no_grad():
        return float((model.eval()(test[0]).argmax(1) == test[1]).float().mean())


def pruned_share(model: nn.Module) -> float:
    """Share of the convolution and linear weights that a mask takes away."""
    masks = [mask for name, mask in model.named_buffers() if name.endswith("weight_mask")]
    return 1 - sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def caveat(point: Any) -> str:
    """The sentence without which the picture misleads."""
    sparse, critical = point.values(SPARSE, "FLOP in all")[0], point.values(SCAN, "longest path")[0]
    return CAVEAT.format(ratio=critical / sparse, sparse=sparse, critical=critical)
