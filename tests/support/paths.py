"""Where the scripts lie that tests run in processes of their own, what those need to import, and what files hold."""

import ast
from functools import cache
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
PYTHONPATH = {"PYTHONPATH": str(TESTS)}


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's code, which several tests read."""
    return ast.parse(path.read_text("utf-8"))


def imports_of(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """What it imports anywhere."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """What a file imports anywhere."""
    return imports_of(tree_of(path))
