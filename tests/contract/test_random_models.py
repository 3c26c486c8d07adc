"""Random small models under every mechanism: the plain result, or a refusal; a failing seed prints a minimal model.

`RETIME_RANDOM=5000` asks for so many seeds of each mechanism, `RETIME_RANDOM_START=100` begins there.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from contract.random_models.check import check
from contract.random_models.generator import generate
from contract.random_models.mechanisms import BARE, Mechanism
from contract.random_models.run import Outcome, describe, report, run
from contract.random_models.several_ranks import ON_RANKS, Pair, run_pairs
from contract.random_models.strategies import LIGHTNING
from contract.random_models.training import Way

COUNT = int(os.environ.get("RETIME_RANDOM", "100"))
START = int(os.environ.get("RETIME_RANDOM_START", "0"))
SOON, SOON_ON_RANKS = 10, 20
"""Seeds of each mechanism in `make test`; `make test-all` has the others."""
CHUNK = 10 if COUNT <= 1000 else 100
HERE = {mechanism.name: mechanism for mechanism in [*BARE, *LIGHTNING]}
BY_HAND = {"bare_parts", "memory_budget_tight", "cpu_accumulate_ddp_update_on_host"}
"""Left to `python -m contract.random_models`."""


def chunks(mechanism: Mechanism) -> list[range]:
    """So many seeds a test; fewer of them where each takes long."""
    end = START + -(-COUNT // mechanism.every)
    return [range(first, min(first + CHUNK, end)) for first in range(START, end, CHUNK)]


def first_and_rest(mechanism: Mechanism) -> tuple[range, range]:
    """Those of `make test`, and all others: ranks take long to start."""
    end, soon = START + -(-COUNT // mechanism.every), START + -(-SOON_ON_RANKS // mechanism.every)
    return range(START, min(soon, end)), range(soon, end)


def long(mechanism: Mechanism, seeds: range) -> list[pytest.MarkDecorator]:
    """Mark what `make test` leaves to `make test-all`."""
    return [pytest.mark.long] if seeds[0] >= START + -(-SOON // mechanism.every) else []


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        pytest.param(name, seeds, id=f"{name}-{seeds[0]}", marks=long(HERE[name], seeds))
        for name in HERE
        if name not in BY_HAND
        for seeds in chunks(HERE[name])
    ],
)
def test_trains_as_plain_torch(name: str, seeds: range) -> None:
    assert_clean(HERE[name], run(HERE[name], seeds))


@pytest.mark.timeout(4 * (120 + 5 * COUNT))
@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.long)])
def test_trains_as_ddp(later: bool, tmp_path: Path) -> None:
    mechanisms = [mechanism for mechanism in ON_RANKS if mechanism.name not in BY_HAND]
    pairs = [Pair(one, first_and_rest(one)[later], tmp_path / one.name) for one in mechanisms]
    failed = [report(*ran) for ran in zip(mechanisms, run_pairs(pairs), strict=True) if ran[1].failures]
    assert not failed, "\n\n".join(failed)


def test_a_loop_that_clips_clips_what_no_optimizer_has_too() -> None:
    assert_clean(HERE["bare_backward"], run(HERE["bare_backward"], range(1660, 1661)))


def assert_clean(mechanism: Mechanism, outcome: Outcome) -> None:
    assert not outcome.failures, report(mechanism, outcome)
    on = outcome.counts["on"]
    assert on * 100 >= mechanism.share * outcome.total, f"{mechanism.name} was hardly on: {outcome}"


class _WrongForRecurrent(Way):
    """A mechanism with a defect: gradients of models with an LSTM are too large."""

    def pass_(self, compute: Any, batch: Any, share: int, last: bool) -> Tensor:
        wrong = any(type(module).__name__ == "LSTM" for module in self.model.modules())
        return super().pass_(lambda part: compute(part) * (1.01 if wrong else 1.0), batch, share, last)


def test_a_failing_seed_becomes_the_layer_that_fails() -> None:
    mechanism = Mechanism("wrong", _WrongForRecurrent)
    seed = next(seed for seed in range(100) if "lstm" in generate(seed).kinds() and len(generate(seed).nodes) > 2)
    verdict = check(mechanism, seed)
    assert verdict.kind == "failed"
    text = describe(mechanism, seed, verdict)
    assert (
        text.splitlines()[1]
        == f"Spec(seed={seed}, nodes=(Node(kind='lstm'),), training=Training(steps=1), batch=2, time=1)"
    )


def test_a_seed_gives_the_same_spec_each_time() -> None:
    assert repr(generate(7)) == repr(generate(7))
    assert len({repr(generate(seed)) for seed in range(50)}) == 50
