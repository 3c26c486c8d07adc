"""The contract table: what a strategy computes equals the plain strategy's result, in every scenario.

A strategy joins by one line in `contract/rows.py`.
"""

import pytest

from contract.bench import Scenario
from contract.in_stages import all_completed
from contract.ranks import RankError
from contract.record import assert_same_run, without
from contract.rows import REFUSALS, STRATEGIES, Row
from contract.runs import Runs
from contract.scenarios import SCENARIOS


def marks(row: Row, scenario: Scenario) -> list[pytest.MarkDecorator]:
    """What cannot apply is skipped, with the reason; rows that share another's code are left to `make test-all`."""
    skipped = [pytest.mark.skip(row.cannot[scenario.name])] if scenario.name in row.cannot else []
    return [*skipped, *([pytest.mark.long] if row.only != ("",) and not row.soon else [])]


TABLE = [
    pytest.param(row, scenario, id=f"{row.name}-{scenario.name}", marks=marks(row, scenario))
    for row in STRATEGIES
    for scenario in SCENARIOS.values()
    if scenario.fits(row)
]


@pytest.mark.parametrize(("row", "scenario"), TABLE)
def test_equals_the_plain_strategy(row: Row, scenario: Scenario, contract_runs: Runs) -> None:
    if pattern := row.refusal(scenario.marks):
        with pytest.raises((*REFUSALS, RankError), match=pattern):
            contract_runs.of(row, scenario.name)
        return
    plain, ranks = contract_runs.of(row.reference, scenario.name), contract_runs.of(row, scenario.name)
    if row.is_pipeline:
        plain, ranks = plain * len(ranks), all_completed(ranks, scenario.name)
    for rank, (reference, ours) in enumerate(zip(plain, ranks, strict=True)):
        left_out = row.left_out.get(scenario.name)
        assert_same_run(without(reference, left_out), without(ours, left_out), row.tolerance_in(scenario.name))
        if scenario.name in row.whole:
            row.check_whole(scenario.name, ours)
        else:
            row.check_activity(scenario.marks, ours, warns=rank == 0)


def test_every_name_in_the_table_is_a_scenario() -> None:
    traits = {trait for scenario in SCENARIOS.values() for trait in scenario.traits}
    for row in STRATEGIES:
        assert row.whole.keys() | row.left_out.keys() | row.cannot.keys() <= SCENARIOS.keys()
        assert row.refused.keys() <= SCENARIOS.keys() | traits
        assert not row.cannot.keys() & row.refused.keys()
        assert all(any(name.startswith(start) for name in SCENARIOS) for start in row.looser)
        assert all(any(name.startswith(start) for name in SCENARIOS) for start in row.only)
