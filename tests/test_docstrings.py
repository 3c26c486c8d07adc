"""Docstrings have one dialect, Google's: ``Args:``, ``Returns:``, ``Raises:``; they begin with a noun or a verb."""

import ast
import re
from pathlib import Path

import pytest

from support.paths import tree_of

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("schedules", "foundations", "mechanisms", "modules", "strategies", "callbacks"),
    *("integrations", "recipes", "commands", "src"),
)
OTHER_DIALECTS = {
    "reStructuredText": re.compile(r"^\s*:(param|parameter|arg|type|returns?|rtype|raises?|yields?)\b[^:\n]*:", re.M),
    "Epytext": re.compile(r"^\s*@(param|type|returns?|rtype|raises?)\b", re.M),
    "NumPy": re.compile(r"^\s*(Parameters|Returns|Raises|Yields|Attributes)\n\s*-{3,}\s*$", re.M),
}


def offences(tree: ast.AST) -> list[str]:
    """Docstrings in ``tree`` with fields of another dialect, a line each; strings behind attributes count too."""
    return [
        f"line {node.lineno}: {dialect}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for dialect, fields in OTHER_DIALECTS.items()
        if fields.search(node.value.value)
    ]


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_docstrings_are_in_googles_dialect(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file): found for file in files if (found := offences(tree_of(file)))} == {}


@pytest.mark.parametrize("folder", ROOMS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = (ast.get_docstring(node) or "Nothing").split()[0]
                assert first not in {"What", "Whether", "Of", "Those", "How", "Where", "Why", "Who"}, (file, node.name)


@pytest.mark.parametrize(
    "docstring", ["Add.\n\n:param a: a number\n", "Add.\n\n@return the sum\n", "Add.\n\nReturns\n-------\nthe sum\n"]
)
def test_other_dialects_are_seen(docstring: str) -> None:
    assert len(offences(ast.parse(f"def add(a):\n    '''{docstring}'''"))) == 1
