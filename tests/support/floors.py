"""The picture of docs/architecture.md: folders and rooms, each above those that it imports from.

python tests/support/floors.py            # writes it into the page anew
"""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- floors: begin -->", "<!-- floors: end -->"
FOLDERS = (
    ("commands",),
    ("recipes",),
    ("callbacks", "integrations"),
    ("strategies",),
    ("modules",),
    ("mechanisms",),
    ("foundations",),
    ("schedules",),
)
"""From the top; a test of its own holds imports to this order."""
WITH_ROOMS = {"mechanisms", "foundations"}
WIDTH = 100


def rooms(folder: str) -> dict[str, set[str]]:
    """Return what each room of a folder imports, as ``folder.room``."""
    imports: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        room = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        modules = [
            str(node.module).split(".")[1:3]
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retime.")
        ]
        others = {".".join(module) for module in modules} - {f"{folder}.{room}"}
        imports.setdefault(room, set()).update(others)
    return imports


def floors(folder: str) -> list[list[str]]:
    """Return a folder's rooms by floor, the lowest first: each imports rooms of lower floors only."""
    inside = {
        room: {other.split(".")[1] for other in others if other.startswith(f"{folder}.")}
        for room, others in rooms(folder).items()
    }
    placed: list[list[str]] = []
    while inside:
        floor = sorted(room for room, others in inside.items() if not others & set(inside))
        if not floor:
            raise ValueError(f"rooms of {folder} import one another in a circle: {', '.join(sorted(inside))}")
        placed.append(floor)
        inside = {room: others for room, others in inside.items() if room not in floor}
    return placed


def picture() -> str:
    """Draw all folders, and what each method stands on."""
    lines = []
    for row in FOLDERS:
        name = ", ".join(row)
        if row[0] not in WITH_ROOMS:
            lines.append(name)
            continue
        stacked = floors(row[0])
        for number in reversed(range(len(stacked))):
            lines += _wrapped(name if number == len(stacked) - 1 else "", stacked[number])
    lines.append("")
    for room, others in sorted(rooms("mechanisms").items()):
        methods = sorted(other for other in others if other.startswith("mechanisms."))
        below = sorted(other.split(".")[1] for other in others if other.startswith("foundations."))
        lines += _wrapped(f"{room}", [*(f"[{method.split('.')[1]}]" for method in methods), *below])
    return "\n".join(["```text", *lines, "```"])


def _wrapped(title: str, words: Iterable[str]) -> list[str]:
    lines, line = [], f"{title:18}"
    for word in words:
        if len(line) + len(word) > WIDTH:
            lines.append(line.rstrip())
            line = " " * 18
        line += f"{word}  "
    return [*lines, line.rstrip()]


def page_with_picture(page: str) -> str:
    """Put the picture of today between the page's marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{picture()}\n{END}{behind}"


if __name__ == "__main__":
    PAGE.write_text(page_with_picture(PAGE.read_text("utf-8")), "utf-8")
