"""`make release-check` refuses what does not fit together."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from support.release import disagreement, faults_of_archive, faults_of_wheel, packaged

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("version", "changelog", "said"),
    [
        ("1.1.0.dev0", "## [Unreleased]\n- more\n\n## [1.0.0] - 2026-01-01\n- first\n", None),
        ("1.1.0.dev0", "## [Unreleased]\n\n## [1.0.0] - 2026-01-01\n- first\n", "nothing unreleased"),
        ("1.0.0", "## [Unreleased]\n\n## [1.0.0] - 2026-01-01\n- first\n", None),
        ("1.0.0", "## [1.0.0]\n- first\n", "no date"),
        ("1.0.0", "## [Unreleased]\n- more\n\n## [1.0.0] - 2026-01-01\n- first\n", "is Unreleased"),
        ("1.0.1", "## [1.0.0] - 2026-01-01\n- first\n", "is 1.0.0"),
        ("1.0.0", "# Changelog\n", "no section"),
    ],
)
def test_version_and_changelog_agree(version: str, changelog: str, said: str | None) -> None:
    found = disagreement(version, changelog)
    assert found is None if said is None else said in str(found)


def test_this_version_and_this_changelog_agree() -> None:
    assert disagreement(PROJECT["version"], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) is None


def test_a_wheel_has_the_package_and_nothing_else() -> None:
    tracked = ["src/retime/__init__.py", "src/retime/py.typed", "conf/a.yaml", "conf/README.md", "tests/test_a.py"]
    files = packaged(tracked, ["conf"])
    assert files == {
        "src/retime/__init__.py": "retime/__init__.py",
        "src/retime/py.typed": "retime/py.typed",
        "conf/a.yaml": "retime/conf/a.yaml",
    }
    whole = [*files.values(), "lightning_retime-1.dist-info/RECORD"]
    assert faults_of_wheel([*whole, "retime/conf/pool-12.so"], files.values()) == []
    assert faults_of_wheel(whole[1:], files.values()) == ["the wheel lacks retime/__init__.py"]
    for stray in ("tests/test_a.py", "retime/conf/gone.py", "pool-12.so"):
        assert faults_of_wheel([*whole, stray], files.values()) == [f"the wheel should not have {stray}"]
    assert faults_of_archive(["setup.py"], ["setup.py", "conf/a.yaml"]) == ["the source archive lacks conf/a.yaml"]


def test_every_tracked_file_of_the_package_has_a_pattern() -> None:
    """A kind of file that setuptools is not told of is missing in what is installed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no clone")
    folders = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    heads = tuple(f"{name}/" for name in [*folders, "src"])
    files = [name for name in listed.stdout.splitlines() if name.startswith(heads)]
    packed = packaged(files, folders)
    assert [name for name in files if name not in packed and not name.endswith(".md")] == []
