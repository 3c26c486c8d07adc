"""How old a result is: whether the code that ran stands here as it was, comments and docstrings apart.

A paper's `claims.yaml` names the folders whose code runs. Of these the files count that the result's recipe imports, by
itself or through others; of a folder that it imports nothing of, such as one whose strategy it names, all files count.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from retime.recipes.core.machine import CHANGED, git_says
from retime.recipes.core.results import Result

CURRENT, LOST, UNKNOWN = "current", "commit not in the history", "age unknown"
"""Ages beside `stale`."""
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "retime"

Named = tuple[str, str | None]
"""A module and a name in it; None: all of it."""


def age(result: Result, folders: Sequence[str]) -> str:
    """`current`, `stale, 2 of 9 files` (whose code has changed since the result), or why neither can be said.

    Args:
        result: whose points carry the commits they were measured at.
        folders: of the code that ran, and single files, from the repository's root.
    """
    if not commits(result) or not whole():
        return UNKNOWN
    if not all(map(in_history, commits(result))):
        return LOST
    files = files_that_ran(result.recipe, tuple(folders))
    changed_files = {file for commit in commits(result) for file in files if _has_changed(file, commit)}
    return f"stale, {len(changed_files)} of {len(files)} files" if changed_files else CURRENT


def commits(result: Result) -> list[str]:
    """The commits of a result's points, each once, without the mark of a changed tree."""
    return list(dict.fromkeys(point.commit.removesuffix(CHANGED) for point in result.points if point.commit))


def changed(result: Result) -> bool:
    """Return whether a point was measured with changes that were not committed."""
    return any(point.commit is not None and point.commit.endswith(CHANGED) for point in result.points)


@cache
def whole() -> bool:
    """Return whether this runs from a checkout of the repository with its whole history."""
    return git_says("rev-parse", "--is-shallow-repository") == "false" and bool(
        git_says("ls-files", Path(__file__).name)
    )


@cache
def in_history(commit: str) -> bool:
    """Return whether a commit is an ancestor of what is checked out."""
    return git_says("merge-base", "--is-ancestor", commit, "HEAD") is not None


# Which files ran.


@cache
def files_that_ran(recipe: str, folders: tuple[str, ...]) -> frozenset[str]:
    """Return paths, from the repository's root, of the files in these folders that a recipe's class may run.

    Args:
        recipe: its full name, such as ``"retime.recipes.ooo.single_device.SingleDevice"``.
        folders: and single files.
    """
    imported = {str(PurePosixPath(file.relative_to(_ROOT))) for file in _imported(recipe.rpartition(".")[0])}
    files: set[str] = set()
    for folder in folders:
        there = {file for file in _tree("HEAD") if file == folder or file.startswith(f"{folder}/")}
        files |= (there & imported) or there
    return frozenset(files)


def _imported(module: str) -> set[Path]:
    """Return the files that a module imports, and those that they import, itself among them."""
    found, seen, waiting = set[Path](), set[Named](), list[Named]([(module, None)])
    while waiting:
        one = waiting.pop()
        file = _file_of(one[0])
        if one in seen:
            continue
        seen.add(one)
        if file is None:  # from retime import schedules
            waiting += [(f"{_PACKAGE}.{one[1]}", None)] if one[0] == _PACKAGE and one[1] else []
        elif file.name != "__init__.py" or one[1] is None:
            found.add(file)
            waiting += [name for names in _imports_of(file).values() for name in names]
        else:  # a name of a room's face: where it comes from
            inside = f"{one[0]}.{one[1]}"
            own = [(inside, None)] if _file_of(inside) else []
            waiting += _imports_of(file).get(one[1]) or own or [(one[0], None)]
    return found


@cache
def _imports_of(file: Path) -> dict[str, list[Named]]:
    """Imports of this package anywhere in a file, by the name that they have there."""
    imports: dict[str, list[Named]] = {}
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == _PACKAGE:
            for alias in node.names:
                imports.setdefault(alias.asname or alias.name, []).append((node.module or "", alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{_PACKAGE}."):
                    imports.setdefault(alias.asname or alias.name, []).append((alias.name, None))
    return imports


def _file_of(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if module != _PACKAGE and file.is_file()), None)


# What has changed.


def _has_changed(file: str, commit: str) -> bool:
    before, now = _tree(commit).get(file), _tree("HEAD").get(file)
    return before != now and (before is None or now is None or _code(before) != _code(now))


@cache
def _tree(commit: str) -> dict[str, str]:
    """The Python files of a commit: the number of git's that their content has, by path."""
    entries = (git_says("ls-tree", "-r", "--full-tree", commit) or "").splitlines()
    split = (entry.partition("\t") for entry in entries)
    return {path: facts.split()[2] for facts, _, path in split if path.endswith(".py")}


@cache
def _code(content: str) -> str:
    """Words of a file's code that comments, docstrings and its form do not change."""
    tree = ast.parse(git_says("cat-file", "blob", content) or "")
    return ast.dump(_WithoutDocstrings().visit(tree))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
