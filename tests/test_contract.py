"""The contract table: what a strategy computes equals the plain strategy's result, in every scenario.

A strategy joins by one line in `contract/rows.py`.
"""

import pytest

from contract.bench import Scenario
from contract.record import assert_same_run
from contract.rows import STRATEGIES, Row
from contract.runs import Runs
from contract.scenarios import SCENARIOS

TABLE = [
    pytest.param(row, scenario, id=f"{row.name}-{scenario.name}")
    for row in STRATEGIES
    for scenario in SCENARIOS.values()
    if row.plain == "auto" or not scenario.single
]


@pytest.mark.parametrize(("row", "scenario"), TABLE)
def test_equals_the_plain_strategy(row: Row, scenario: Scenario, contract_runs: Runs) -> None:
    plain = contract_runs.of(row.reference, scenario.name)
    for reference, ours in zip(plain, contract_runs.of(row, scenario.name), strict=True):
        assert_same_run(reference, ours, row.tolerance)
        row.check_activity(scenario.traits, ours)
