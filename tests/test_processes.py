"""How tests are shared out among several processes."""

from pathlib import Path

from contract.rows import STRATEGIES
from support.processes import LONGEST, TABLE, share_of

ROOT = Path(__file__).parents[1]


def test_rows_with_one_plain_run_share_a_process() -> None:
    shares = {row.plain: set() for row in STRATEGIES}
    for row in STRATEGIES:
        shares[row.plain].add(share_of(f"{TABLE}::test_equals_the_plain_strategy[{row.name}-a_scenario]"))
    assert shares == {"auto": {TABLE}, "pipeline": {TABLE}, "ddp": {f"{TABLE} on several ranks"}}


def test_a_file_is_a_share() -> None:
    assert share_of("tests/a/test_b.py::test_c[ddp-::]") == share_of("tests/a/test_b.py::test_d") == "tests/a/test_b.py"


def test_the_longest_shares_are_there() -> None:
    assert all((ROOT / share.removesuffix(" on several ranks")).is_file() for share in LONGEST)
