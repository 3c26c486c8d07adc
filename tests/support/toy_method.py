"""How many files a new method takes: adds one that counts steps to a copy of what is committed, and lists them.

python tests/support/toy_method.py        # some minutes: the tests that hold a new method to the rules run there
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEW = {
    "mechanisms/toy/__init__.py": '''"""A toy: counts the steps that are taken."""

from retime.mechanisms.toy.counter import StepCounter

__all__ = ["StepCounter"]
''',
    "mechanisms/toy/README.md": "# Toy\nCounts steps.\n",
    "mechanisms/toy/counter.py": '''"""A count of steps."""

from dataclasses import dataclass


@dataclass
class StepCounter:
    """Counts steps."""

    steps: int = 0
''',
    "strategies/toy.py": '''"""One device, and a count of its steps."""

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from retime.mechanisms.toy import StepCounter


class ToyStrategy(SingleDeviceStrategy):
    """Plain training on one device, with its steps counted."""

    def __init__(self, device: Any = "cpu", **kwargs: Any) -> None:
        super().__init__(device=device, **kwargs)
        self.counter = StepCounter()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and count."""
        self.counter.steps += 1
        return super().optimizer_step(*args, **kwargs)
''',
    "tests/mechanisms/toy/test_counter.py": """from retime.mechanisms.toy import StepCounter


def test_it_begins_with_none() -> None:
    assert StepCounter().steps == 0
""",
}
CHANGES = {
    "strategies/__init__.py": (
        ("\n__all__ = [\n", "from retime.strategies.toy import ToyStrategy\n\n__all__ = [\n"),
        ('    "OOOPipelineStrategy",\n', '    "OOOPipelineStrategy",\n    "ToyStrategy",\n'),
        (
            '    ("memory_budget", ',
            '    ("toy_steps", ToyStrategy, False, "steps counted", {}),\n    ("memory_budget", ',
        ),
    ),
    "docs/start.md": (("| `fused_optimizer`,", "| `toy_steps` | - | same bits | - |\n| `fused_optimizer`,"),),
    "tests/contract/rows.py": (
        (
            '    Row("fused_optimizer", ',
            '    Row("toy_steps", lambda _: "toy_steps", only=FEW),\n    Row("fused_optimizer", ',
        ),
    ),
    "tests/test_public_arguments.py": (
        (
            "    Case(memory.part_sizes,",
            '    Case(retime.ToyStrategy, free=("device", "kwargs")),\n    Case(memory.part_sizes,',
        ),
    ),
    "CHANGELOG.md": (("### Added\n", "### Added\n- `toy_steps` counts steps.\n"),),
}
GENERATED = "docs/architecture.md"  # the picture in it
TESTS = (
    *("tests/test_docstrings.py", "tests/test_documentation.py", "tests/test_floors.py", "tests/test_import_rules.py"),
    *("tests/test_public_arguments.py", "tests/strategies/test_strategies.py", "tests/mechanisms/toy"),
    *("tests/contract/test_contract.py",),
)


def add(copy: Path) -> None:
    """Write the method into a copy of the tree."""
    for name, text in NEW.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text, "utf-8")
    for name, edits in CHANGES.items():
        page = (copy / name).read_text("utf-8")
        for before, after in edits:
            if before not in page:
                sys.exit(f"{name} has no {before!r} any more: mend CHANGES in {Path(__file__).name}")
            page = page.replace(before, after, 1)
        (copy / name).write_text(page, "utf-8")
    subprocess.run([sys.executable, "tests/support/floors.py"], cwd=copy, check=True)


def main() -> None:
    """Add it, run the tests, and print what git sees."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        add(copy)
        installed = Path(folder, "installed")
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(installed))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "."], cwd=copy, check=True)
        status = ["git", "status", "--porcelain", "--untracked-files=all", "--", ".", ":!build", ":!*.egg-info"]
        print(subprocess.run(status, cwd=copy, check=True, capture_output=True, text=True).stdout, flush=True)
        # of the contract the toy's row; a method is more than its few lines
        chosen = "(not test_equals_the_plain and not test_refuses and not test_a_small_file) or toy_steps"
        run = [sys.executable, "-m", "pytest", "-q", *TESTS, "-k", chosen]
        sys.exit(subprocess.run(run, cwd=copy, env={**os.environ, "PYTHONPATH": str(installed)}).returncode)


if __name__ == "__main__":
    main()
