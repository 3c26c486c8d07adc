"""What a process may use of a CPU's memory, and budgets in percent of that."""

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from retime.mechanisms.memory_budget import report as cpu_limits
from retime.mechanisms.memory_budget.report import own_bytes, parse_budget, shared_bytes
from support.warm_start import run_program

TOTAL = 10**12


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 10^12 bytes without limits."""
    monkeypatch.setattr(cpu_limits, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def in_groups(root: Path, lines: str, limits: dict[str, str]) -> None:
    write(root / "proc/self/cgroup", lines)
    for name, text in limits.items():
        write(root / "sys/fs/cgroup" / name, text)


def test_without_control_groups_it_is_the_machine(root: Path) -> None:
    assert shared_bytes() == own_bytes() == TOTAL


@pytest.mark.parametrize(
    ("lines", "limits", "least"),
    [
        ("0::/a/b", {"a/b/memory.max": "5000", "a/memory.max": "max"}, 5000),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4000"}, 4000),  # what is around a group limits it
        ("0::/a/b", {"a/b/memory.max": "max"}, TOTAL),
        ("0::/", {"memory.max": "3000"}, 3000),  # in a container that sees its own group as the outermost
        ("0::/", {"other/memory.max": "1"}, TOTAL),
        ("0::/../../a", {"a/memory.max": "6000"}, 6000),
        ("0::/a:b", {"a:b/memory.max": "7000"}, 7000),
        ("4:cpu,memory:/c\n0::/", {"memory/c/memory.limit_in_bytes": "2000"}, 2000),
        ("4:memory:/c/d", {"memory/c/memory.limit_in_bytes": "1000", "memory/c/d/memory.limit_in_bytes": "2000"}, 1000),
        ("4:memory:/docker/0123", {"memory/memory.limit_in_bytes": "1500"}, 1500),  # named as outside of the container
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, TOTAL),  # none
        ("4:cpu:/c\n0::/", {"memory/c/memory.limit_in_bytes": "2000"}, TOTAL),
        ("4:cpu:/\n0::/u", {"unified/u/memory.max": "8000"}, 8000),
    ],
)
def test_control_groups_limit_a_cpus_memory(root: Path, lines: str, limits: dict[str, str], least: int) -> None:
    in_groups(root, lines, limits)
    assert shared_bytes() == own_bytes() == least
    assert parse_budget("50%", "cpu") == least // 2
    assert parse_budget("auto", "cpu") == parse_budget("90%", "cpu")


def test_a_budget_above_the_limit_is_refused(root: Path) -> None:
    in_groups(root, "0::/", {"memory.max": "3000"})
    assert parse_budget(3000, "cpu") == 3000
    with pytest.raises(ValueError, match="cpu has 3000: give at most that"):
        parse_budget(3001, "cpu")
    assert parse_budget(3001, None) == 3001, "where training will run is not known"


def test_processes_share_the_machine_but_no_limits_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_groups(root, "0::/", {"memory.max": "8000"})
    assert parse_budget("50%", "cpu", sharing=4) == 1000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3000, resource.RLIM_INFINITY))
    assert parse_budget("50%", "cpu", sharing=2) == 1500
    assert parse_budget("50%", "cpu", sharing=4) == 1000


@pytest.mark.parametrize("name", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_real_limit_on_the_process_counts(name: str) -> None:
    program = f"""
import resource
from retime.mechanisms.memory_budget.report import parse_budget
hard = resource.getrlimit(resource.{name})[1]
resource.setrlimit(resource.{name}, (2**34, hard))
print(parse_budget("50%", "cpu"))
"""
    if own_bytes() < 2**34:
        pytest.skip("less memory here than the limit that would be set")
    assert int(run_program(program)) == 2**33
