"""The picture of docs/architecture.md, of rooms above those that they import from, and the table of CONTRIBUTING.md.

python tests/support/floors.py            # writes both into their pages anew
"""

import ast
from collections.abc import Iterable
from itertools import combinations_with_replacement
from pathlib import Path

from retime.foundations.compatibility import Mechanism, Owned, together

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- drawn: begin -->\n\n", "\n\n<!-- drawn: end -->"
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


def table() -> str:
    """Write in Markdown what each mechanism owns, and each pair once."""
    heads = " | ".join(one.value for one in Mechanism)
    lines = [f"| | owns | {heads} |", "|---" * (len(Mechanism) + 2) + "|"]
    pairs = {pair: together(*pair).value for pair in combinations_with_replacement(Mechanism, 2)}
    for one in Mechanism:
        owned = ", ".join(part.value for part in Owned if part in one.owns) or "nothing"
        cells = [pairs.get((one, other), "") for other in Mechanism]
        lines.append(f"| {one.value} | {owned} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


DRAWN = {"docs/architecture.md": picture, "CONTRIBUTING.md": table}


def drawn(page: str) -> tuple[str, str]:
    """Return a page as it is, and with today's drawing between its marks."""
    text = (ROOT / page).read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    return text, f"{before}{BEGIN}{DRAWN[page]()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page in DRAWN:
        (ROOT / page).write_text(drawn(page)[1], "utf-8")
