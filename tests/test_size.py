"""The package keeps the number of lines that pyproject.toml gives it: less code behind the same promise is progress."""

import pytest

from support.size import PRODUCT, ROOT, budget, lines_of


@pytest.mark.parametrize(("part", "folders"), [("product", PRODUCT), ("tests", ("tests",))])
def test_the_lines_are_within_their_budget(part: str, folders: tuple[str, ...]) -> None:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = sum(path.read_text("utf-8").count("\n") for path in files)
    assert lines <= budget()[part], f"{part} has {lines:,} lines: delete some, or raise tool.retime.lines in a review"


def test_lines_are_told_apart() -> None:
    lines = lines_of('"""What.\n\nMore.\n"""\n\nimport os  # why\n\n# a comment\nx = """\ntext\n"""\n')
    assert (lines.files, lines.code, lines.words, lines.blank) == (1, 4, 5, 2)
