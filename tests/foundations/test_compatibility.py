"""Which mechanisms go together: every pair composes, steps aside or is refused, with one sentence."""

import re
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from retime import (
    CPUAccumulateStrategy,
    FusedOptimizerDDPStrategy,
    FusedOptimizerStrategy,
    MemoryBudgetDDPStrategy,
    MemoryBudgetStrategy,
    OOODataParallelStrategy,
    OOOPipelineStrategy,
    OOOSingleDeviceStrategy,
)
from retime.callbacks.fuse_optimizer import FuseOptimizer
from retime.foundations.compatibility import Mechanism, Owned, Together, refuse, together, why_aside, why_not
from retime.strategies.support.fused_stepping import mechanisms_of

BACKWARD, FORWARD, OOO, IN_STEP, BUDGET, HOST, UPDATE, SCAN, PIPE, STREAMS, USERS, *_ = Mechanism
REFUSED = {
    BACKWARD: (BACKWARD, FORWARD, OOO, IN_STEP, HOST, UPDATE, PIPE, STREAMS, USERS),
    FORWARD: (FORWARD, OOO, UPDATE, PIPE),
    OOO: (OOO, IN_STEP, BUDGET, HOST, UPDATE, PIPE, STREAMS, USERS),
    IN_STEP: (IN_STEP, BUDGET, HOST, PIPE, STREAMS, USERS),
    BUDGET: (BUDGET, PIPE, STREAMS),
    HOST: (HOST, PIPE, STREAMS, USERS),
    UPDATE: (UPDATE, PIPE, STREAMS),
    PIPE: (PIPE, STREAMS, USERS),
    STREAMS: (STREAMS, USERS),
    USERS: (USERS,),
}
ASIDE = {BACKWARD: (BUDGET,)}
PAIRS = list(combinations_with_replacement(Mechanism, 2))


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda one: one.name)
def test_every_pair_is_decided_and_says_why(first: Mechanism, second: Mechanism) -> None:
    decided = "COMPOSE"
    for name, pairs in {"REFUSED": REFUSED, "ASIDE": ASIDE}.items():
        decided = name if second in pairs.get(first, ()) else decided
    for one, other in ((first, second), (second, first)):
        assert together(one, other) is Together[decided]
        sentence = why_not(one, other)
        if decided == "COMPOSE":
            assert sentence is None
            refuse(one, [other])
            continue
        assert "{" not in sentence
        assert any(advice in sentence for advice in ("drop one of the two", "use ", "leave out "))
        if decided == "REFUSED":
            with pytest.raises(ValueError, match=re.escape(sentence)):
                refuse(one, [SCAN, other])
        else:
            refuse(one, [other])
            assert why_aside(one, [SCAN, other]) == sentence


def test_what_two_own_both_cannot_have() -> None:
    for one, other in PAIRS:
        if one.owns & other.owns:
            assert together(one, other) is Together.REFUSED
    assert {part for one in Mechanism for part in one.owns} == set(Owned)


@pytest.mark.parametrize(
    ("strategy", "brought"),
    [
        (lambda: SingleDeviceStrategy("cpu"), ()),
        (lambda: DDPStrategy(), ()),
        (lambda: DDPStrategy(ddp_comm_hook=allreduce_hook), (USERS,)),
        (lambda: FusedOptimizerStrategy(), (BACKWARD,)),
        (lambda: FusedOptimizerStrategy("forward"), (FORWARD,)),
        (lambda: FusedOptimizerDDPStrategy(ddp_comm_hook=allreduce_hook), (BACKWARD, USERS)),
        (lambda: OOODataParallelStrategy(), (OOO,)),
        (lambda: MemoryBudgetStrategy("1GiB"), (BUDGET,)),
        (lambda: FusedOptimizerDDPStrategy("forward", reduce_on="host"), (FORWARD, HOST)),
        (lambda: FusedOptimizerDDPStrategy(reduce_on="host"), (BACKWARD,)),
        (lambda: OOODataParallelStrategy(reduce_on="host"), (OOO,)),
        (lambda: MemoryBudgetDDPStrategy("1GiB", reduce_on="host"), (BUDGET, HOST)),
        (lambda: OOOPipelineStrategy(), (PIPE,)),
        (lambda: OOOSingleDeviceStrategy(), (STREAMS,)),
        (lambda: CPUAccumulateStrategy(), (HOST,)),
        (lambda: CPUAccumulateStrategy(update_on_host=True), (HOST, UPDATE)),
    ],
)
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_the_callback_asks_the_table(
    strategy: Any, brought: tuple[Mechanism, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = type("FakeTrainer", (), {})()
    fake.strategy = strategy()
    monkeypatch.setattr(DDPStrategy, "root_device", torch.device("cpu"))
    assert mechanisms_of(fake.strategy) == brought
    refused = [other for other in brought if together(Mechanism.fusion(mode), other) is Together.REFUSED]
    if refused:
        with pytest.raises(ValueError, match=r"drop one of the two|use (FusedOptimizerDDPStrategy|FuseOptimizer)"):
            FuseOptimizer(mode).setup(fake, None, "fit")  # type: ignore[arg-type]
    else:
        FuseOptimizer(mode).setup(fake, None, "fit")  # type: ignore[arg-type]
