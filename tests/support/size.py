"""How many lines each room has, of code, of docstrings and comments, and blank: ``make size``."""

import argparse
import ast
import io
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    *("schedules", "foundations", "mechanisms", "modules", "strategies", "callbacks", "integrations", "commands"),
    *("recipes", "conf", "src"),
)
ROOMS_OF = {"foundations", "mechanisms", "recipes"}
"""Folders that are counted room by room."""


@dataclass
class Lines:
    """Numbers of lines."""

    files: int = 0
    code: int = 0
    words: int = 0
    blank: int = 0

    @property
    def all(self) -> int:
        return self.code + self.words + self.blank

    def add(self, other: "Lines") -> None:
        """Add another's numbers."""
        self.files += other.files
        self.code += other.code
        self.words += other.words
        self.blank += other.blank


def lines_of(source: str) -> Lines:
    """Count a file's lines; a docstring's and a comment's are words, blank ones inside of docstrings too."""
    total = source.count("\n")
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            words.add(token.start[0])
    blank = sum(not line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in words)
    return Lines(1, total - len(words) - blank, len(words), blank)


def rooms(folders: tuple[str, ...] = PRODUCT) -> dict[str, Lines]:
    """Count the rooms of these folders."""
    counted: dict[str, Lines] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            room = "/".join(parts[:2]) if folder in ROOMS_OF and len(parts) > 2 else folder
            counted.setdefault(room, Lines()).add(lines_of(path.read_text("utf-8")))
    return counted


def budget() -> dict[str, int]:
    """Read the numbers of lines that a reviewed change alone raises, from pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["retime"]["lines"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'':32}{'files':>7}{'lines':>8}{'code':>8}{'words':>8}{'blank':>8}")
    for title, folders in (("product", PRODUCT), ("tests", ("tests",))):
        total = Lines()
        for room, lines in rooms(folders).items():
            total.add(lines)
            if title == "product":
                print(f"{room:32}{lines.files:7,}{lines.all:8,}{lines.code:8,}{lines.words:8,}{lines.blank:8,}")
        limit = f"  of at most {budget()[title]:,} lines"
        print(f"{title:32}{total.files:7,}{total.all:8,}{total.code:8,}{total.words:8,}{total.blank:8,}{limit}")


if __name__ == "__main__":
    main()
