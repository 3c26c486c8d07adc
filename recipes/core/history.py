"""How old a result is: whether its commit is part of the history, and how many commits since have changed its code."""

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from retime.recipes.core.machine import CHANGED
from retime.recipes.core.results import Result

CURRENT, LOST, UNKNOWN = "current", "commit not in the history", "age unknown"


def commits(result: Result) -> list[str]:
    """The commits of a result's points, each once, without the mark of a changed tree."""
    return list(dict.fromkeys(point.commit.removesuffix(CHANGED) for point in result.points if point.commit))


def changed(result: Result) -> bool:
    """Whether a point was measured with changes that were not committed."""
    return any(point.commit is not None and point.commit.endswith(CHANGED) for point in result.points)


def age(result: Result, folders: Sequence[str]) -> str:
    """`current`, `stale, N commits` (that touch `folders` since the oldest commit), or why neither can be said.

    Args:
        result: whose points carry the commits they were measured at.
        folders: from the repository's root; of a folder that was moved, commits before that are not counted.
    """
    if not commits(result) or not whole():
        return UNKNOWN
    if not all(in_history(commit) for commit in commits(result)):
        return LOST
    since = max(_touching(commit, tuple(folders)) for commit in commits(result))
    return f"stale, {since} commit{'s' if since > 1 else ''}" if since else CURRENT


@cache
def whole() -> bool:
    """Whether this runs from a checkout of the repository with its whole history."""
    return _git("rev-parse", "--is-shallow-repository") == "false" and bool(_git("ls-files", Path(__file__).name))


@cache
def in_history(commit: str) -> bool:
    """Whether a commit is an ancestor of what is checked out."""
    return _git("merge-base", "--is-ancestor", commit, "HEAD") is not None


@cache
def _touching(commit: str, folders: tuple[str, ...]) -> int:
    return int(_git("rev-list", "--count", f"{commit}..HEAD", "--", *(f":(top){folder}" for folder in folders)) or 0)


def _git(*arguments: str) -> str | None:
    """What git prints in this folder, or None where it fails or is not there."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
