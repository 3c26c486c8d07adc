"""The contract table: what a strategy computes equals the plain strategy's result, in every scenario.

A strategy joins by one line in `contract/rows.py`.
"""

import pytest

from contract.bench import Scenario
from contract.ranks import RankError
from contract.record import assert_same_run, without
from contract.rows import REFUSALS, STRATEGIES, Row
from contract.runs import Runs
from contract.scenarios import SCENARIOS

TABLE = [
    pytest.param(row, scenario, id=f"{row.name}-{scenario.name}")
    for row in STRATEGIES
    for scenario in SCENARIOS.values()
    if scenario.fits(row)
]


@pytest.mark.parametrize(("row", "scenario"), TABLE)
def test_equals_the_plain_strategy(row: Row, scenario: Scenario, contract_runs: Runs) -> None:
    if pattern := row.refusal(scenario.traits):
        with pytest.raises((*REFUSALS, RankError), match=pattern):
            contract_runs.of(row, scenario.name)
        return
    plain = contract_runs.of(row.reference, scenario.name)
    for reference, ours in zip(plain, contract_runs.of(row, scenario.name), strict=True):
        left_out = row.left_out.get(scenario.name)
        assert_same_run(without(reference, left_out), without(ours, left_out), row.tolerance_in(scenario.name))
        if scenario.name in row.whole:
            row.check_whole(scenario.name, ours)
        else:
            row.check_activity(scenario.traits, ours)


def test_every_name_in_the_table_is_a_scenario() -> None:
    for row in STRATEGIES:
        assert row.whole.keys() | row.left_out.keys() <= SCENARIOS.keys()
        assert all(any(name.startswith(start) for name in SCENARIOS) for start in row.looser)
        assert all(any(name.startswith(start) for name in SCENARIOS) for start in row.only)
