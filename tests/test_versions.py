"""What is claimed of versions has passed the smoke set: the page that `make matrix` wrote."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`.*?) \|$", re.MULTILINE)
COLUMNS = ("combination", "python", "torch", "lightning", "accelerate", "transformers", "smoke set", "day")


def passed() -> list[dict[str, str]]:
    """The rows of the page that the matrix writes."""
    return [dict(zip(COLUMNS, row.split(" | "), strict=True)) for row in ROW.findall(PAGE)]


def test_all_combinations_on_the_page_have_passed() -> None:
    assert passed()
    assert [row for row in passed() if not re.fullmatch(r"\d+ passed", row["smoke set"])] == []


def test_what_is_asked_for_is_what_has_passed() -> None:
    """Lower bounds are the oldest versions that passed, and what passed is allowed."""
    extras = PROJECT["optional-dependencies"]
    asked = {one.name: one.specifier for one in map(Requirement, [*PROJECT["dependencies"], *extras["transformers"]])}
    for package in ("torch", "lightning", "accelerate", "transformers"):
        versions = sorted(Version(row[package]) for row in passed())
        (least,) = (Version(one.version) for one in asked[package] if one.operator == ">=")
        oldest = versions[0]
        assert (least.major, least.minor) == (oldest.major, oldest.minor), package
        assert least <= oldest
        assert [one for one in versions if one not in asked[package]] == []


def test_what_has_no_column_has_passed_at_its_lower_bound() -> None:
    (line,) = re.findall(r"^The environment of `oldest` had besides: (.*)\.$", PAGE, re.MULTILINE)
    had = {name: Version(number) for name, number in (one.split(" ") for one in line.split(", "))}
    asked = map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]])
    least = {one.name: Version(bound.version) for one in asked for bound in one.specifier if bound.operator == ">="}
    assert had == {name: bound for name, bound in least.items() if name not in COLUMNS}


def test_pythons_that_are_named_have_passed() -> None:
    pythons = {".".join(row["python"].split(".")[:2]) for row in passed()}
    named = {re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PROJECT["classifiers"]}
    assert {one[1] for one in named if one} == pythons
    assert PROJECT["requires-python"] == f">={min(pythons, key=Version)}"
