"""Links that leave the repository, each asked for once: ``python tests/support/outside_links.py``, where a network is.

A line a link says what its server answered. A redirection counts as an answer, since publishers refuse scripts behind
their DOI. Ends with 1 if a server says that something is not there, with 2 if no server was reached.
"""

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"https?://(?!www\.w3\.org/2000/)[\w.-]+\.[a-z]{2,}[^\s)>\"'`\]}|]*")


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: the redirection is raised as an HTTPError."""


def links() -> dict[str, str]:
    """Return the links of all files that git tracks, each with a file that has it."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    pages = [name for name in names if name.endswith((".md", ".py", ".toml", ".cff", ".yaml"))]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages}
    return {link.rstrip(".,:;"): name for name, text in texts.items() for link in LINK.findall(text)}


def answer(link: str) -> int:
    """Return the status that a server answers, or 0 if none was reached."""
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


if __name__ == "__main__":
    answers = []
    for link, name in links().items():
        answers.append(answer(link))
        said = f"answers {answers[-1]}" if answers[-1] else "not checked: no answer"
        print(f"{'NOT THERE' if answers[-1] in (404, 410) else said}: {link} ({name})", flush=True)
    print(f"{sum(map(bool, answers))} of {len(answers)} links were checked")
    sys.exit(1 if {404, 410} & {*answers} else 0 if any(answers) else 2)
