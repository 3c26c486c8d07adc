"""Objects of a ``transformers.Trainer`` on two ranks, beside the plain Trainer's DistributedDataParallel."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
from transformers import Trainer

from retime.integrations.transformers import CPUAccumulate, FusedOptimizer, MemoryBudget, OutOfOrderDataParallel
from support.ranks import SHARED, on_ranks
from support.transformers_trainers import Left, assert_same, fit, trainer

WINDOWS = {"gradient_accumulation_steps": 3, "ddp_find_unused_parameters": False, "ddp_backend": "gloo"}
NO_CLIPPING = {"max_grad_norm": 0}
WAYS: dict[str, tuple[Callable[[Trainer], Any], dict[str, Any], str]] = {
    "forward": (lambda one: FusedOptimizer(one, "forward"), {}, "forward fusion: "),
    "backward": (lambda one: FusedOptimizer(one, "backward"), NO_CLIPPING, "backward fusion: "),
    "out of order": (lambda one: OutOfOrderDataParallel(one, k=1), {}, "blocks"),
    "host": (CPUAccumulate, {}, "2 ranks in shared memory"),
    "budget": (lambda one: MemoryBudget(one, "1GiB"), {}, "memory budget 1 GiB: 8 steps"),
}


@cache
def plain_fits(**options: Any) -> list[Left]:
    """What the plain Trainer leaves after a first and after a second training."""
    plain = trainer(SHARED, **WINDOWS | options)
    return [fit(plain) for _ in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@on_ranks(2, joined=False)
def test_two_ranks_have_the_same_bits() -> None:
    for way, (give, options, said) in WAYS.items():
        plain, ours = plain_fits(**options), trainer(SHARED, **WINDOWS | options)
        one = give(ours)
        for left in plain:
            assert_same(left, fit(ours), norms=way != "backward")
            assert said in str(one.report()), one.report()
        one.remove()


REST = {
    **{"bf16": True, "label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2},
    **{"save_strategy": "steps", "save_steps": 3},
}


def run(way: str, folder: str, on: bool, resume: str | None = None) -> Left:
    """Train from the first step on, or from the third of a folder."""
    give, options, said = WAYS[way]
    one = trainer(SHARED / way / folder, **WINDOWS | REST | options)
    put = give(one) if on else None
    left = fit(one, resume_from_checkpoint=resume and str(SHARED / way / resume / "checkpoint-3"))
    assert put is None or said.removesuffix("8 steps") in str(put.report()), put.report()
    return left


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@on_ranks(2)  # in a start of its own, which short runs leave out
def test_two_ranks_resume_in_both_directions_in_bf16_with_label_smoothing_and_evaluation() -> None:
    for way in WAYS:
        norms = way != "backward"
        plain = run(way, "plain", on=False)
        assert_same(plain, run(way, "ours", on=True), norms)
        resumed = run(way, "resumed", False, "plain")
        assert all(torch.equal(value, resumed.tensors[name]) for name, value in plain.tensors.items())
        for folder, on, resume in (("a", False, "ours"), ("b", True, "plain"), ("c", True, "ours")):
            assert_same(resumed, run(way, folder, on, resume), norms)
