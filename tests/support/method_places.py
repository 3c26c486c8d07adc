"""Places that adding a method touches, tried with a toy method in a copy of the tree.

    python tests/support/method_places.py

With all that is WRITTEN, and what COMMAND draws, CHECKS pass. Without what is written into any one of the files a check
fails, so each must be touched. A folder of the root counts as one place, whatever is written in it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "tests/support/floors.py"  # the picture of docs/architecture.md and the table of CONTRIBUTING.md
STRATEGY = '''"""Toy method as a strategy."""

from retime.foundations.compatibility import Mechanism
from retime.mechanisms.toy import ToyStep
from retime.strategies.support.base import SingleDevice


class ToyStrategy(SingleDevice):
    """Strategy that trains as ever."""

    strategy_name = "toy_method"
    mechanisms = (Mechanism.TOY,)
    step = ToyStep
'''
STEP = '"""Toy step."""\n\n\nclass ToyStep:\n    """Step that does nothing."""\n' + "\n" * 100  # a station of its own
FACE = '"""Toy."""\n\nfrom retime.mechanisms.toy.step import ToyStep\n\n__all__ = ["ToyStep"]\n'
ROW = "| `toy_method` | `ToyStrategy` | same bits | [toy](../mechanisms/toy/README.md) |\n"
PLAIN = (ROOT / "examples" / "lightning" / "plain.py").read_text("utf-8")
EXAMPLE = PLAIN.replace("\n\n\nclass", "\n\nimport retime  # retime\n\n\nclass", 1)
EXAMPLE = EXAMPLE.replace("        logger=", '        strategy="toy_method",  # retime\n        logger=', 1)
LAST = "OOOSingleDeviceStrategy"
WRITTEN = (
    ("mechanisms/toy/__init__.py", "", FACE),
    ("mechanisms/toy/step.py", "", STEP),
    ("mechanisms/toy/README.md", "", "# Toy\n"),
    ("strategies/toy.py", "", STRATEGY),
    ("strategies/__init__.py", f"import {LAST}\n", "from retime.strategies.toy import ToyStrategy\n"),
    ("strategies/__init__.py", f'    "{LAST}",\n', '    "ToyStrategy",\n'),
    ("strategies/__init__.py", "] = (\n", '    ("toy_method", ToyStrategy, False, "as ever", {}),\n'),
    ("foundations/compatibility.py", 'hook of your own"\n', '    TOY = "a toy"\n'),
    ("foundations/compatibility.py", "_RIGHTS = {\n", "    Mechanism.TOY: _Rights(frozenset()),\n"),
    ("docs/start.md", "| result | card |\n|---|---|---|---|\n", ROW),
    ("docs/api.md", f".. autoclass:: retime.{LAST}\n", ".. autoclass:: retime.ToyStrategy\n"),
    ("docs/examples.md", "|---|---|---|---|---|\n", "| nothing | [toy](../examples/lightning/toy.py) | | | |\n"),
    ("examples/lightning/toy.py", "", EXAMPLE),
    (
        "commands/advise_worker.py",
        "str, Method] = {\n",
        '    "toy_method": Method(_SAME, "toy_method", bare="ToyStep()"),\n',
    ),
    ("tests/contract/rows.py", "\nSTRATEGIES = [\n", '    Row("toy_method", lambda _: "toy_method"),\n'),
)
"""A file, the text there that the addition follows (none: the file is new), and the addition."""
FILES = tuple(dict.fromkeys(name for name, *_ in WRITTEN))
UNASKED = ("tests/mechanisms/toy/", "CHANGELOG.md")
"""Places that CONTRIBUTING.md asks for, and no check."""
OF_DOORS = ("tests/test_examples.py", "tests/commands/test_advise.py")
NAMES = (
    "tests/strategies/test_strategies.py",
    "tests/test_documentation.py",
    *OF_DOORS,
    "-k",
    "names or cards or each_",
)
"""Checks one of which fails without any place."""
CHECKS = (
    *("tests/test_import_rules.py", "tests/test_floors.py", "tests/foundations/test_compatibility.py"),
    *("tests/test_docstrings.py", "tests/test_public_arguments.py", "tests/strategies/test_strategies.py"),
    *("tests/test_documentation.py", "tests/contract/test_contract.py", *OF_DOORS, "-k"),
    "names or cards or links or tables or rules or face or drawn or Toy or toy or each_ or toy_method-accumulate_with",
)


class Copy:
    """Copy of the tree, with a folder from which Python imports it."""

    def __init__(self, folder: Path) -> None:
        self.tree, imports = folder / "tree", folder / "imports" / "retime"
        left_out = shutil.ignore_patterns(".*", "outputs", "build", "dist", "shared")
        shutil.copytree(ROOT, self.tree, ignore=left_out, symlinks=True)
        imports.mkdir(parents=True)
        for package in (self.tree / "src" / "retime" / "__init__.py", *self.tree.glob("*/__init__.py")):
            source = package if package.parent.name == "retime" else package.parent
            (imports / source.name).symlink_to(source)
        path = os.pathsep.join(filter(None, [str(imports.parent), os.environ.get("PYTHONPATH")]))
        self._environment = os.environ | {"PYTHONPATH": path}

    def write(self, left_out: str = "") -> None:
        """Add the toy method, but for what is written into one file."""
        for name in FILES:
            path, text = self.tree / name, (ROOT / name).read_text("utf-8") if (ROOT / name).exists() else ""
            path.parent.mkdir(exist_ok=True)
            for _, before, added in (one for one in WRITTEN if one[0] == name != left_out):
                assert before in text, f"{name} has no {before!r}"
                text = text.replace(before, before + added, 1)
            path.write_text(text, "utf-8") if text else path.unlink(missing_ok=True)

    def complaint(self, *checks: str) -> str:
        """Return what pytest says of failing checks; empty: they pass."""
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *checks]
        ran = subprocess.run(words, cwd=self.tree, env=self._environment, capture_output=True, text=True, check=False)
        return ran.stdout if ran.returncode else ""

    def complaint_of_all(self) -> str:
        """Return what all checks say where every place is touched, which is to be nothing."""
        self.write()
        subprocess.run([sys.executable, COMMAND], cwd=self.tree, env=self._environment, check=True)
        return self.complaint(*CHECKS)


def places() -> list[str]:
    """Return the files to touch; those in one folder of the root are one place."""
    by_folder: dict[str, str] = {}
    for name in (*FILES, *UNASKED):
        folder = name.partition("/")[0]
        by_folder[folder] = f"{folder}/" if folder in by_folder else name
    return list(by_folder.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        toy = Copy(Path(folder))
        print(toy.complaint_of_all() or "With all of these the checks pass:")
        for name in FILES:
            toy.write(left_out=name)
            print(f"  {name}: {'must be touched' if toy.complaint(*NAMES) else 'no check asks for it'}", flush=True)
    print(*(f"  {name}: by agreement, no check asks for it" for name in UNASKED), sep="\n")
    print(f"{len(places())} places: {', '.join(places())}")
