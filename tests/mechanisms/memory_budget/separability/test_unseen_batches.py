"""Steps whose few probed samples show nothing of what they do to a whole batch end with the plain weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.messages import NoEffectWarning
from support.memory_losses import Learner
from support.memory_trained import Trained, trained

SAMPLES, FEATURES, CLASSES, STEPS = 12, 4, 3, 5
Batch = dict[str, Tensor]
Loss = Callable[["Net", Batch], Tensor]


class Net(Learner):
    def __init__(self) -> None:
        super().__init__(FEATURES)
        self.calls = 0
        self.register_buffer("ramp", torch.zeros(()))
        self.shares = torch.tensor([1.0, 0.0])
        self.double()

    def steps(self, b: Batch) -> Tensor:
        """(B, T)"""
        return torch.tanh(self.two(b["x"]))[:, :1] * torch.arange(1.0, STEPS + 1)


def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [
        {
            "x": torch.randn(SAMPLES, FEATURES, dtype=torch.float64),
            "y": torch.randint(CLASSES, (SAMPLES,)),
            "name": torch.tensor([0, 1, 2, 3, 4, 5, 5, 5, 8, 9, 10, 11]),  # what a probe takes differs
            "keep": torch.ones(SAMPLES, dtype=torch.bool),
        }
        for _ in range(4)
    ]


def change(model: Net, step: int) -> None:
    """The terms that had no weight in the first batch get one."""
    model.share = 0.5
    model.ramp.fill_(0.5)
    model.shares = torch.tensor([1.0, 0.5])


def both(
    loss: Loss, given: Callable[[], list[Batch]] = batches, change: Callable[..., None] = change, **options: Any
) -> tuple[Trained, Trained]:
    torch.manual_seed(0)
    model = Net()
    plain, budgeted = (trained(loss, model, given(), budget, change, **options) for budget in (False, True))
    return plain, budgeted


def _branch(m: Net, b: Batch) -> Tensor:
    return m.each(b).mean() if len(b["x"]) <= 8 else m.each(b).mean() + m.two(b["x"]).std(0).sum()


def _branch_of_constants(m: Net, b: Batch) -> Tensor:
    return m.each(b).mean() * (1.0 if len(b["x"]) <= 8 else 0.5)


def _power(m: Net, b: Batch) -> Tensor:
    return m.each(b).mul(1.0 + 0.1).pow(2.0 if len(b["x"]) < 7 else 3.0).mean()


def _first_eight(m: Net, b: Batch) -> Tensor:
    return m.each(b).mean() + m.steps(b)[:8].square().sum() / len(b["x"])


def _mixed_above(m: Net, b: Batch) -> Tensor:
    h = m.two(b["x"])
    return m.each(b).mean() + (h * h.flip(0) if len(h) > 6 else h).square().mean()


BY_SIZE: dict[str, Loss] = {
    "at least six": lambda m, b: m.each(b).sum() / max(len(b["x"]), 6),
    "at most eight": lambda m, b: m.each(b).sum() / min(len(b["x"]), 8),
    "at least six, in a tensor": lambda m, b: m.each(b).sum() / torch.tensor(max(len(b["x"]), 6)),
    "at least six, clamped": lambda m, b: m.each(b).sum() / torch.tensor(len(b["x"])).clamp(min=6),
    "times a tensor": lambda m, b: m.each(b).sum() * torch.tensor(1 / max(len(b["x"]), 6)),
    "each by at least six": lambda m, b: (m.each(b) / max(len(b["x"]), 6)).sum(),
    "filled": lambda m, b: (m.each(b) * torch.full((len(b["x"]),), 1 / max(len(b["x"]), 6))).sum(),
    "branch": _branch,
    "branch of constants": _branch_of_constants,
    "power": _power,
    "the first eight": _first_eight,
    "mixed above": _mixed_above,
    "another reduction": lambda m, b: F.cross_entropy(
        m(b["x"]), b["y"], reduction="mean" if len(b["x"]) < 8 else "sum"
    ),
    "another class ignored": lambda m, b: F.cross_entropy(
        m(b["x"]), b["y"], ignore_index=-100 if len(b["x"]) < 8 else 0
    ),
}

COUNTED: dict[str, Loss] = {
    "classes present": lambda m, b: m.each(b).sum() / len(b["y"].unique()),
    "names present": lambda m, b: m.each(b).sum() / len(b["name"].unique()),
    "names present, as a factor": lambda m, b: m.each(b).mean() * len(b["name"].unique()) / len(b["name"]),
    "kept": lambda m, b: m.each(b).sum() / len(b["x"][b["keep"] & (b["name"] != 5)]),
    "found": lambda m, b: m.each(b).sum() / len((b["name"] != 5).nonzero()),
    "kept, for another term": lambda m, b: (
        m.each(b)[b["name"] != 5].mean() + m.steps(b).sum() / len(m.each(b)[b["name"] != 5])
    ),
}


def _dropped(m: Net, b: Batch) -> Tensor:
    mask = F.dropout(torch.ones(len(b["x"]), dtype=torch.float64), 0.5) / 2
    return (m.each(b) * mask).sum() / mask.sum().clamp(min=1)


def _dropped_module(m: Net, b: Batch) -> Tensor:
    mask = (nn.Dropout(0.5)(torch.ones_like(b["x"][:, 0])) > 0).double()
    return (m.each(b) * mask).sum() / mask.sum().clamp(min=1)


DROPPED: dict[str, Loss] = {"function": _dropped, "module": _dropped_module}


def _turned(m: Net, b: Batch) -> Tensor:
    return m.steps(b).reshape(STEPS, -1).prod(0).square().mean()


def _shifted(m: Net, b: Batch) -> Tensor:
    h = m.two(b["x"])
    return (h.flatten()[1:] * h.flatten()[:-1]).mean()


HIDDEN: dict[str, Loss] = {
    "turned by a reshape": lambda m, b: m.each(b).mean() + m.share * _turned(m, b),
    "by a buffer": lambda m, b: m.each(b).mean() + m.ramp * _turned(m, b),
    "by a vector": lambda m, b: (torch.stack([m.each(b).mean(), _turned(m, b)]) * m.shares).sum(),
    "by a dot product": lambda m, b: torch.stack([m.each(b).mean(), _turned(m, b)]) @ m.shares.double(),
    "by alpha": lambda m, b: torch.add(m.each(b).mean(), _turned(m, b), alpha=m.share),
    "by lerp": lambda m, b: torch.lerp(m.each(b).mean(), _turned(m, b), m.share),
    "over a number": lambda m, b: m.each(b).mean() + m.share / len(b["x"]) * _turned(m, b).sum(),
    "shifted": lambda m, b: m.each(b).mean() + m.share * _shifted(m, b),
    "sum by a tensor": lambda m, b: m.each(b).sum() * torch.tensor(1 / len(b["x"])) + m.share * m.steps(b).sum(),
}


KINDS = {"larger batches do": BY_SIZE, "counts": COUNTED, "terms of no weight": HIDDEN}
SEEN = {f"{which}: {name}": loss for which, losses in KINDS.items() for name, loss in losses.items()}


@pytest.mark.parametrize("name", SEEN)
def test_what_few_samples_do_not_show_is_seen(name: str) -> None:
    plain, budgeted = both(SEEN[name])
    assert budgeted.differs_from(plain) < 1e-7, f"split: {budgeted.split}; {budgeted.reason}"


@pytest.mark.parametrize("entry", [lambda n: [0] * n, lambda n: {"boxes": [0] * n, "id": 1}], ids=["lists", "dicts"])
def test_lengths_that_are_alike_in_the_first_batch_are_those_of_each(entry: Callable[[int], Any]) -> None:
    def uneven() -> list[Batch]:
        lengths = [[1 + (number and row) for row in range(SAMPLES)] for number in range(4)]
        return [{**one, "boxes": [*map(entry, rows)]} for one, rows in zip(batches(), lengths, strict=True)]

    def loss(m: Net, b: Any) -> Tensor:
        return m.each(b).sum() / sum(len(one if isinstance(one, list) else one["boxes"]) for one in b["boxes"])

    plain, budgeted = both(loss, uneven, unchanged)
    assert budgeted.differs_from(plain) < 1e-7


@pytest.mark.parametrize("name", DROPPED)
def test_what_dropout_leaves_is_no_count(name: str) -> None:
    assert not both(DROPPED[name])[1].split


def unchanged(model: Any, step: int) -> None:
    """All terms keep their weights."""


BETWEEN: dict[str, Loss] = {
    "a branch": lambda m, b: m.each(b).mean() * (2 if 6 < len(b["x"]) < 10 else 1),
    "a number": lambda m, b: m.each(b).sum() / (len(b["x"]) if len(b["x"]) != 8 else 4),
    "rows": lambda m, b: m.each(b)[: 4 if len(b["x"]) == 8 else None].mean(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_only_the_parts_that_run_do_is_seen(name: str) -> None:
    def whole() -> list[Batch]:
        torch.manual_seed(1)
        return [{"x": torch.randn(16, FEATURES).double(), "y": torch.randint(CLASSES, (16,))} for _ in range(3)]

    with pytest.warns(NoEffectWarning, match="run whole"):
        plain, budgeted = both(BETWEEN[name], whole, unchanged, sub_batch=8)
    assert budgeted.differs_from(plain) < 1e-7


def test_a_smaller_batch_of_a_size_that_was_not_compared_is() -> None:
    def loss(m: Net, b: Batch) -> Tensor:
        return m.each(b).mean() * (2 if len(b["x"]) == 10 else 1)

    def some(samples: int) -> Batch:
        return {"x": torch.randn(samples, FEATURES).double(), "y": torch.randint(CLASSES, (samples,))}

    def of_sizes() -> list[Batch]:
        torch.manual_seed(1)
        return [some(12), some(10), some(12)]

    with pytest.warns(NoEffectWarning, match="run whole"):
        plain, budgeted = both(loss, of_sizes, unchanged)
    assert budgeted.split
    assert budgeted.differs_from(plain) < 1e-7


calls = 0
weight = 1.0


def _counting(m: Net, b: Batch) -> Tensor:
    global calls
    calls += 1
    return m.each(b).mean() * (1 if calls <= 7 else 0.25)


def _weighing(m: Net, b: Batch) -> Tensor:
    global weight
    weight = 0.5 * weight
    return m.each(b).mean() * weight


def _enclosing() -> Loss:
    seen = 0

    def loss(m: Net, b: Batch) -> Tensor:
        nonlocal seen
        seen += 1
        return m.each(b).mean() * (2 if seen % 3 else 1)

    return loss


def _attribute(m: Net, b: Batch) -> Tensor:
    m.calls += 1
    return m.each(b).mean() * (1 if m.calls <= 3 else 0.25)


def _often(every: int) -> Loss:
    def loss(m: Net, b: Batch) -> Tensor:
        m.calls += 1
        return m.each(b).mean() + (m.head.weight.square().sum() if m.calls % every == 0 else 0)

    return loss


class Counts(Net):
    total = 0


def _of_the_class(m: Net, b: Batch) -> Tensor:
    Counts.total += 1
    return m.each(b).mean() / (1 + Counts.total)


COUNTERS: dict[str, Callable[[], Loss]] = {
    "global": lambda: _counting,
    "weight": lambda: _weighing,
    "of an enclosing function": _enclosing,
    "attribute": lambda: _attribute,
    "of a class": lambda: _of_the_class,
    **{f"every {every}": partial(_often, every) for every in (4, 32, 64, 128, 500, 1000)},
}


@pytest.mark.parametrize("name", COUNTERS)
def test_calls_that_a_step_counts_are_those_of_training(name: str) -> None:
    global calls, weight

    def run(budgeted: bool) -> Trained:
        global calls, weight
        calls, weight, Counts.total = 0, 1.0, 0
        torch.manual_seed(0)
        return trained(COUNTERS[name](), Net(), batches(), budgeted)

    plain, budgeted = run(False), run(True)

    assert not budgeted.split
    assert budgeted.differs_from(plain) == 0


def test_a_count_of_calls_that_computes_nothing_is_as_it_was() -> None:
    torch.manual_seed(0)

    def loss(m: Net, b: Batch) -> Tensor:
        global calls
        calls, m.calls = calls + 1, m.calls + 1
        return m.each(b).mean()

    assert trained(loss, Net(), batches(), True).split


@torch.library.custom_op("retime_tests::same", mutates_args=())
def _same(x: Tensor) -> Tensor:
    return x.clone()


def _without_fake(m: Net, b: Batch) -> Tensor:
    return F.cross_entropy(m(_same(b["x"])), b["y"], reduction="sum") / max(len(b["x"]), 6)


def test_a_step_that_does_not_run_without_values_is_not_split() -> None:
    plain, budgeted = both(_without_fake)
    assert not budgeted.split
    assert budgeted.differs_from(plain) == 0


@pytest.mark.parametrize("read", [Tensor.item, bool, float])
def test_a_value_read_under_inference_mode_is_seen(read: Callable[[Tensor], Any]) -> None:
    def loss(m: Net, b: Batch) -> Tensor:
        with torch.inference_mode():
            value = read(m(b["x"])[:, 0].mean() > 0.02)
        return m.each(b).mean() * (0.5 if value else 2.0)

    plain, budgeted = both(loss)
    assert budgeted.differs_from(plain) < 1e-12
