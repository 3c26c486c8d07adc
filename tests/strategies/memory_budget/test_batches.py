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
from support.memory_budget import SMALL, Net, assert_close, assert_same, assert_way, fit, fit_both, loader, report_of

pytestmark = support.IGNORED


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor
    name: str = "train"


class Graph:
    """An object that nothing can be known of but by a hook."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.held = {"x": [x], "y": y}


Made = tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]
KINDS: dict[str, Made] = {
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "nested": (
        lambda x, y: {"in": {"x": x, "mask": None, "split": "train"}, "out": [(y, ["name"] * len(y))], "epoch": 3},
        lambda batch: (batch["in"]["x"], batch["out"][0][0]),
    ),
    "dataclass": (Frozen, lambda batch: (batch.x, batch.y)),
    "encoding": (lambda x, y: UserDict(x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "object": (Graph, lambda batch: (batch.held["x"][0], batch.held["y"])),
}


def cut(batch: Graph, sub_batch: int) -> list[Graph]:
    parts = zip(batch.held["x"][0].split(sub_batch), batch.held["y"].split(sub_batch), strict=True)
    return [Graph(x, y) for x, y in parts]


class Normalises(Net):
    """Writes into its batch, as preprocessing on the device may."""

    def __init__(self, get: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.get = get

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.get(batch)
        x.sub_(0.2).mul_(1.1)
        y.remainder_(3)
        return F.cross_entropy(self.net(x), y)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_may_write_into_its_batch(way: str, kind: str) -> None:
    """Dry runs and probes write into copies: the batch that is trained with is the one that came."""
    make, get = KINDS[kind]

    def data() -> Any:
        batches = [make(x.clone(), y.clone()) for x, y in loader(2, extra=19)]
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    plain, ours = Normalises(get), Normalises(get)
    fit(plain, data=data())
    # what the step makes of its labels, those to be ignored perhaps, cannot be counted from the batch
    options: dict[str, Any] = {"loss_weight": lambda part: len(get(part)[1])}
    if kind == "object":
        options["split_batch"] = cut
    done = fit(ours, MemoryBudgetStrategy(SMALL, **options), data=data())
    report = report_of(done)
    assert_way(report, way)
    # the batch counts, and its storages stay, whatever holds them
    assert report.shapes[0].choice.peak_bytes == {"offload": 110_696, "sub-batches": 98_416}[way]
    assert_same(plain, ours, way)


class Edits(Net):
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


FIRST, LAST = 2, 16  # layers whose outputs are saved
INSIDE = {"itself": lambda t: t.mul_(2), "view": lambda t: t.T[3, 5:9].zero_()}


@pytest.mark.parametrize("change", list(INSIDE))
@pytest.mark.parametrize("layer", [FIRST, LAST])
def test_edits_of_saved_tensors_are_refused(offloads: None, layer: int, change: str) -> None:
    """PyTorch leaves this check to saved-tensor hooks."""
    plain, ours = Net(), Edits(layer, INSIDE[change])
    fit(plain, limit_train_batches=1)
    runner = support.trainer(MemoryBudgetStrategy(SMALL))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        runner.fit(ours, loader(3))
    plan = report_of(runner).shapes[0].choice.plan
    assert 0 < len(plan.offload) < plan.saved, "the first layers' outputs leave, the last ones' stay"
    assert_close(plain, ours, 0)  # as after batch 0


class EditsHarmlessly(Net):
    """In-place operations that autograd allows: before something is saved, and of what no gradient needs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.net[0](batch[0])
        value.mul_(1.5)
        for layer in self.net[1:-1]:
            value = layer(value)
        first = value.exp()  # saved by exp
        second = first * 2  # saves nothing of them
        second += 1
        second.sigmoid_()
        unused = value.exp()
        unused.mul_(3)
        return F.cross_entropy(self.net[-1](second), batch[1])


def test_allowed_edits_give_the_same_numbers(way: str) -> None:
    plain, ours, report = fit_both(EditsHarmlessly, SMALL)
    assert_way(report, way)
    assert_same(plain, ours, way)
