"""Batches of many kinds under a memory budget, and steps that write into them or into what autograd saved."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SHALLOW, ShallowNet, assert_close, assert_same, assert_way, fit, loader, report_of

pytestmark = support.IGNORED
BUDGET = 110_000


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "train"


class Graph:
    """An object that nothing can be known of but by a hook."""

    def __init__(self, *values: Tensor) -> None:
        self.held = {"x": [*values[:-1]], "y": values[-1]}


def many_kinds(a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> Any:
    """Features in a nested dict, a dataclass and a mapping of its own."""
    nested = {"in": {"x": a, "mask": None, "split": "train"}, "out": [(y, ["name"] * len(y))], "epoch": 3}
    return nested, Frozen(b), UserDict(x=c)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "known": (many_kinds, lambda batch: [batch[0]["in"]["x"], batch[1].x, batch[2]["x"], batch[0]["out"][0][0]]),
    "object": (Graph, lambda batch: [*batch.held["x"], batch.held["y"]]),
}


def cut(batch: Graph, sub_batch: int) -> list[Graph]:
    return [Graph(*part) for part in zip(*(v.split(sub_batch) for v in KINDS["object"][1](batch)), strict=True)]


class Writes(ShallowNet):
    """Writes into its batch, as preprocessing on the device may, and into values where autograd allows it."""

    def __init__(self, get: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.get = get

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        *parts, y = self.get(batch)
        for part in parts:
            part.sub_(0.2).mul_(1.1)
        y.remainder_(3)
        value = self.net[0](torch.cat(parts, 1))
        value.mul_(1.5)  # before something is saved
        for layer in self.net[1:-1]:
            value = layer(value)
        first = value.exp()  # saved by exp
        second = first * 2  # saves nothing of them
        second += 1
        second.sigmoid_()
        unused = value.exp()
        unused.mul_(3)  # no gradient needs it
        return F.cross_entropy(self.net[-1](second), y)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(("offload", "known"), ("sub-batches", "known"), ("sub-batches", "object")),
        pytest.param("offload", "object", marks=pytest.mark.long),
    ],
    indirect=["way"],
)
def test_a_step_may_write_into_its_batch_and_where_autograd_allows_it(way: str, kind: str) -> None:
    """Dry runs and probes write into copies: the batch that is trained with is the one that came."""
    make, get = KINDS[kind]

    def data() -> Any:
        extra = 0 if kind == "object" else 19  # nothing tells that a smaller object is of the same shape
        batches = [make(*(part.clone() for part in x.split([4, 4, 8], 1)), y.clone()) for x, y in loader(2, extra)]
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    plain, ours = Writes(get), Writes(get)
    fit(plain, data=data())
    # what the step makes of its labels, those to be ignored perhaps, cannot be counted from the batch
    options: dict[str, Any] = {"loss_weight": lambda part: len(get(part)[-1])}
    if kind == "object":
        options["split_batch"] = cut
    done = fit(ours, MemoryBudgetStrategy(BUDGET, **options), data=data())
    report = report_of(done)
    assert_way(report, way)
    # the batch counts, and its storages stay, whatever holds them
    assert report.shapes[0].choice.peak_bytes == {"offload": 106_344, "sub-batches": 84_272}[way]
    assert_same(plain, ours, way)


class Edits(ShallowNet):
    """In batch 1, writes into what was saved in the forward pass: some that left, or some that stayed."""

    def __init__(self, layer: int, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = batch[0]
        for number, layer in enumerate(self.net):
            value = layer(value)
            if number == self.layer:
                saved = value
        if batch_idx == 1:
            with torch.no_grad():
                self.change(saved)
        return F.cross_entropy(value, batch[1])


FIRST, LAST = 2, 8  # layers whose outputs are saved
INSIDE = {"itself": lambda t: t.mul_(2), "view": lambda t: t.T[3, 5:9].zero_()}


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        *((FIRST, "view"), (LAST, "itself")),
        pytest.param(FIRST, "itself", marks=pytest.mark.long),
        pytest.param(LAST, "view", marks=pytest.mark.long),
    ],
)
def test_edits_of_saved_tensors_are_refused(offloads: None, layer: int, change: str) -> None:
    """PyTorch leaves this check to saved-tensor hooks."""
    plain, ours = ShallowNet(), Edits(layer, INSIDE[change])
    fit(plain, limit_train_batches=1)
    runner = support.trainer(MemoryBudgetStrategy(SHALLOW))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        runner.fit(ours, loader(3))
    plan = report_of(runner).shapes[0].choice.plan
    assert 0 < len(plan.offload) < plan.saved, "the first layers' outputs leave, the last ones' stay"
    assert_close(plain, ours, 0)  # as after batch 0
