"""The documentation site: `make docs` builds it from the front page, the pages beside this file and the cards.

Sphinx with furo, and not mkdocs-material, whose maintenance ends in May 2027. Pages are plain Markdown that a code host
shows too, so the tables of contents are added here.
"""

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

project, author = "retime", "the authors of retime"
release = metadata.version("lightning-retime")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/**.md"),
    *("foundations/**/README.md", "mechanisms/**/README.md", "results/README.md", "results/**/result.md"),
]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "retime"
html_static_path = ["static"]
html_css_files = ["site.css"]


def cards(folder: str) -> list[str]:
    """Return the pages of a folder's rooms."""
    root = Path(__file__).parents[1]
    return [path.relative_to(root).with_suffix("").as_posix() for path in sorted(root.glob(f"{folder}/**/README.md"))]


CONTENTS = {
    "Start": [
        *("docs/start", "docs/choose", "docs/advise", "docs/transformers", "docs/examples"),
        *("docs/questions/out_of_memory", "docs/questions/how_much_memory"),
    ],
    "Questions": [
        *("docs/questions/gradient_accumulation", "docs/questions/slow_ddp", "docs/questions/rnns_on_a_cpu"),
        "docs/questions/how_it_stays_equal",
    ],
    "Methods": cards("mechanisms"),
    "Evidence": ["results/README", "docs/recipes", "docs/gpu"],
    "Reference": [
        "docs/api",
        "docs/schedules",
        "docs/versions",
        "docs/architecture",
        "CONTRIBUTING",
        "SECURITY",
        "CODE_OF_CONDUCT",
        "CHANGELOG",
    ],
    "Foundations": cards("foundations"),
}


def add_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Append the tables of contents to the pages that have them."""
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += _table(f":caption: {caption}", *(f"/{one}" for one in pages))
    elif page == "results/README":
        # its anchors are HTML, which a code host shows; Sphinx knows those of spans
        source[0] = re.sub(r'<a id="([^"]+)"></a>', r"[]{#\1}", source[0]) + _table(":glob:", "**/result")
    if page.startswith("results/"):  # their tables take the place of the list of sections
        source[0] = "---\nhide-toc: true\n---\n" + source[0]


def _table(*lines: str) -> str:
    return "\n```{toctree}\n:hidden:\n" + "\n".join(lines) + "\n```\n"


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Let the folder itself open the front page."""
    if error is None and app.builder.name == "html":
        page = '<!doctype html><title>retime</title><meta http-equiv="refresh" content="0; url=README.html">\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
