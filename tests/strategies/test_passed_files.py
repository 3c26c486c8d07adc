"""A settled batch's way through the files is short: how many files, and how often it goes back to one.

`python tests/support/passed_files.py NAME --calls 60` says who is entered how often.
"""

import re

import pytest

from support.ranks import run_ranks

ONE_DEVICE = ("fused_optimizer", "fused_optimizer_forward", "memory_budget", "ooo_single_device", "scan")
MOST = {
    ("fused_optimizer",): (4, 18),
    ("fused_optimizer_forward",): (4, 45),
    ("fused_optimizer_ddp",): (6, 15),
    ("memory_budget", "--budget", "1.2MiB"): (14, 175),  # in parts
    ("memory_budget", "--budget", "2.3MiB", "--batchnorm"): (18, 430),  # offloading
    ("memory_budget", "--budget", "1.2MiB", "--batch", "0"): (40, 60_000),  # planning
    ("ooo_single_device",): (5, 70),
    ("scan",): (6, 16),
    ("cpu_accumulate_ddp",): (5, 6),
    ("ooo_ddp",): (13, 150),
    ("ooo_pipeline",): (25, 720),  # which order is planned depends on measured times
}
"""At most so many files and returns, by the tool's arguments."""
LATER = ("memory_budget", "scan", "fused_optimizer_forward", "fused_optimizer_ddp")
"""Left to `make test-all`: their first batches take long, or they pass files of `fused_optimizer`."""


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(one, id=" ".join(one), marks=[pytest.mark.long] if one[0] in LATER else []) for one in MOST],
)
def test_a_settled_batch_passes_few_files(arguments: tuple[str, ...]) -> None:
    ran = run_ranks(1 if arguments[0] in ONE_DEVICE else 2, "passed_files.py", *arguments)[0]
    passed = re.search(r"(\d+) files, (\d+) returns", ran.stdout)
    assert passed is not None, ran.stderr
    files, returns = MOST[arguments]
    assert int(passed[1]) <= files, ran.stdout
    assert int(passed[2]) <= returns, ran.stdout
