"""Tests in several processes (`pytest --numprocesses`): which ones share a process, and which begin first."""

import pytest
from xdist.scheduler import LoadScopeScheduling

TABLE = "tests/contract/test_contract.py"
LONGEST = (
    "tests/contract/test_random_models.py",
    f"{TABLE} on several ranks",
    "tests/mechanisms/out_of_order/test_data_parallel.py",
    "tests/mechanisms/memory_budget/test_plans_graph_paths.py",
    "tests/mechanisms/pipeline/test_step.py",
    "tests/strategies/memory_budget/test_ddp.py",
    "tests/strategies/test_killed_ranks.py",
    "tests/commands/test_advise_whole.py",
    "tests/mechanisms/memory_budget/test_costs_limit.py",
    "tests/test_notebooks.py",
    "tests/test_documentation.py",
    TABLE,
)
"""What takes longest begins first, so that no process works on alone at the end. The rest keeps its order."""


def share_of(nodeid: str) -> str:
    """The tests of one share run in one process: a file's, as they use the same fixtures.

    The contract table has two shares, by the plain runs that its rows are compared with: one device or several ranks.
    """
    file, _, test = nodeid.partition("::")
    row, _, _ = test.partition("[")[2].partition("-")
    return f"{file} on several ranks" if file == TABLE and "ddp" in row else file


def longest_first(items: list[pytest.Item]) -> None:
    """Put the longest shares in front."""
    rank = {share: number for number, share in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(share_of(item.nodeid), len(rank)))


class Shares(LoadScopeScheduling):
    """Hands out whole shares, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # else by the number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
