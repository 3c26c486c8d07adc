"""How BPPSA's recipes train, and what stale gradients cost a training: Figure 12.

PipeDream's updates are "partially asynchronous" (BPPSA, section 2.2), and it stores "multiple versions of weights for
all batches that enter the pipeline": a mini-batch goes backward at the weights at which it went forward, though others
have updated them since. GPU k of n, from 0, starts n - k mini-batches before the first gradient comes back to it, and
keeps as many versions (`weight_stashing` counts them). Hence its gradients are of weights n - 1 - k updates old, those
of the last GPU of weights that are new. Appendix C finds that this costs accuracy with Adam.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from retime.foundations.measure import spread
from retime.recipes.bppsa.settings import ConvolutionalSettings, claim, compared
from retime.recipes.core import charts
from retime.recipes.core.build import build, build_model, build_optimizer, loss_of
from retime.recipes.core.claims import Comparison, show
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Result, Row, titled
from retime.schedules.pipeline import StageCosts, block, even_stages, weight_stashing

Batch = tuple[Tensor, Tensor]


def batches(data: Any, batch_size: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Batches without end, in an order that depends on the seed alone; the last part of an epoch is left out."""
    if len(data) < batch_size:
        raise ValueError(f"batch_size={batch_size}, but the data set has only {len(data)} examples")
    random = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data), generator=random)
        for rows in torch.split(order, batch_size)[: len(data) // batch_size]:
            yield collated(data, rows.tolist(), device)


def collated(data: Any, rows: Iterable[int], device: torch.device) -> Batch:
    """These rows of a data set as a batch."""
    inputs, targets = default_collate([data[row] for row in rows])
    return inputs.to(device), targets.to(device)


def test_split(settings: ConvolutionalSettings, device: torch.device) -> Batch:
    """All of the test split as one batch."""
    data = build(settings.data, split="val")
    return collated(data, range(len(data)), device)


Late = list[tuple[nn.Parameter, deque[Tensor]]]


def train(
    model: nn.Module, settings: ConvolutionalSettings, count: int, delays: Sequence[int] = ()
) -> Iterator[Tensor]:
    """Train for `count` steps; the loss of each, when its update is done.

    Forward and backward pass see weights that are so many updates old, for each parameter in turn, if there are delays.
    """
    optimizer = build_optimizer(settings.optimizer, model.parameters(), {})
    pairs = zip(model.parameters(), delays, strict=False)
    late = [(weight, deque([weight.detach().clone()], delay + 1)) for weight, delay in pairs if delay]
    like = next(model.parameters())
    feed = batches(build(settings.data), settings.batch_size, settings.seed, like.device)
    for number, (inputs, targets) in enumerate(islice(feed, count), 1):
        model.train()
        take(late, 0)
        optimizer.zero_grad()
        loss = loss_of(model(inputs.to(like.dtype)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        take(late, -1)
        optimizer.step()
        for weight, versions in late:
            versions.append(weight.detach().clone())
        if settings.decay_every and number % settings.decay_every == 0:
            optimizer.param_groups[0]["lr"] /= 10
        yield loss.detach()


def take(late: Late, version: int) -> None:
    """Write the oldest version, 0, or the newest, -1, into weights."""
    with torch.no_grad():
        for weight, versions in late:
            weight.copy_(versions[version])


def accuracy(model: nn.Module, test: Batch) -> float:
    """Share of the test split that the model, put into evaluation, names right."""
    with torch.no_grad():
        return float((model.eval()(test[0]).argmax(1) == test[1]).float().mean())


FRESH, STALE = "no delay", "PipeDream's delays"
ACCURACY = "test accuracy"


class Staleness(Recipe[ConvolutionalSettings]):
    """Figure 12: the same training with PipeDream's delays and without, for `rounds` seeds of weights and order."""

    quantity = ACCURACY

    def blocks(self, settings: ConvolutionalSettings) -> int | None:
        return 2 * settings.rounds

    def measure(self, settings: ConvolutionalSettings, at: dict[str, Any], tick: Tick) -> Measured:
        device, every = torch.device(settings.hardware.device), settings.evaluate_every
        if not 0 < every <= settings.steps or settings.steps % every:
            raise ValueError(f"steps={settings.steps} has to be a positive multiple of evaluate_every={every}")
        test = test_split(settings, device)
        curves: dict[str, list[list[float]]] = {FRESH: [], STALE: []}
        for seed in range(settings.seed, settings.seed + settings.rounds):
            for name, runs in curves.items():
                model = build_model(settings.model, device, seed)
                delays = pipedream_delays(model, settings.ranks) if name == STALE else []
                steps = enumerate(train(model, replace(settings, seed=seed), settings.steps, delays), 1)
                runs.append([round(100 * accuracy(model, test), 3) for number, _ in steps if number % every == 0])
                tick(name)
        rows = [Row(name, ACCURACY, "%", [curve[-1] for curve in runs]) for name, runs in curves.items()]
        facts: dict[str, Any] = {f"{name}, {ACCURACY} (%)": [*zip(*runs, strict=True)] for name, runs in curves.items()}
        return Measured(rows, {"GPUs": settings.ranks, "delays of the weights": delays, **facts})

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        fresh, stale = (point.values(name, ACCURACY) for name in (FRESH, STALE))
        lost = [one - other for one, other in zip(fresh, stale, strict=True)]
        reached = ", ".join(f"{show(point.spread(name, ACCURACY), '%')} with {name}" for name in (FRESH, STALE))
        words = f"{reached}; less in {sum(one > 0 for one in lost)} of {len(lost)} seeds"
        return [compared(claim("figure-12"), spread(lost), words)]

    def notes(self, result: Result) -> list[str]:
        return [
            "Delays are in updates of a layer's weights, in 1F1B over consecutive layers, as many on each GPU: the "
            "paper does not say which were where. BPPSA's gradients have no delay (Figure 6). Of ten classes the top 5 "
            "say nothing."
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        drawing, axes = charts.figure(titled(result))
        for colour, name in zip(charts.COLOURS, (FRESH, STALE), strict=False):
            seeds = point.facts[f"{name}, {ACCURACY} (%)"]
            places = [point.settings["evaluate_every"] * (number + 1) for number in range(len(seeds))]
            axes.plot(places, [statistics.fmean(values) for values in seeds], color=colour, label=f"{name}, mean")
            axes.fill_between(places, [*map(min, seeds)], [*map(max, seeds)], color=colour, alpha=0.2, linewidth=0)
        axes.set_xlabel("training step")
        axes.set_ylabel("accuracy on the test split (%), band: all seeds")
        axes.legend(fontsize=8)
        charts.save(drawing, path)


def pipedream_delays(model: nn.Module, ranks: int) -> list[int]:
    """For each parameter by how many updates its weights are old, its layers lying on `ranks` GPUs."""
    layers = [list(layer.parameters(recurse=False)) for layer in model.modules()]
    layers = [weights for weights in layers if weights]
    versions = weight_stashing(block(ranks, ranks), 1, StageCosts.uniform(ranks)).versions
    placed = zip(layers, even_stages([1] * len(layers), range(ranks)), strict=True)
    return [versions[rank] - 1 for weights, rank in placed for _ in weights]
