"""The pages for users are true as far as a machine can tell: code runs, prints what stands below it, and links lead.

A block of Python on a page runs by itself, with the names of :func:`names` at hand: what a reader has too, a model, an
optimizer and data. Blocks marked ``python no-run`` need several ranks or a GPU, or are lines of a script; they are
counted (:data:`NOT_RUN`). A block ``text`` right behind a block of Python is what that prints.
"""

import contextlib
import importlib
import inspect
import io
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from retime import DifferenceWarning, NoEffectWarning
from support.browser import CHROMIUM, NO_CHROMIUM, Browser

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "foundations/**/README.md", "mechanisms/**/README.md", "results/README.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"
)
SITE = sorted((ROOT / "outputs" / "site").rglob("*.html"))
NOT_RUN = {
    **dict.fromkeys(("docs/examples.md", "docs/transformers.md", "docs/questions/gradient_accumulation.md"), 1),
    **dict.fromkeys((f"docs/questions/{one}.md" for one in ("how_much_memory", "rnns_on_a_cpu", "slow_ddp")), 1),
    "mechanisms/memory_budget/README.md": 1,
    "mechanisms/out_of_order/README.md": 2,
    "mechanisms/pipeline/README.md": 3,
}
OTHERS = ["fusion.FuseOptimizer", "out_of_order.ReverseFirstK", "scan.ParallelScanBackward", "cpu_pool.CPUMemoryPool"]
BARE = re.compile(r"isms\.(\w+)\.(\w+)\n")
FUSE, GIVEN = ("fusion", "fuse_optimizer"), {"model", "optimizer", "optimizers", "ddp_kwargs", "named"}
MOST_WORDS = 30
FRONT_PAGE, FRONT_PAGE_LINES, FRONT_PAGE_WORDS = ROOT / "README.md", 120, 25
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"^ *<!-- from (\S+) -->\n *```python no-run\n(.*?)^ *```\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w.]+(?:/[\w.]+)*/[\w]+\.(?:py|cpp|md|yaml|json))`")


class Block(NamedTuple):
    page: Path
    line: int
    marks: str
    code: str
    printed: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks() -> list[Block]:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2], match[3])
        for page, text in texts.items()
        for match in BLOCK.finditer(text)
    ]


BLOCKS = blocks()


class Module(lightning.pytorch.LightningModule):
    """A LightningModule as a reader has one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def names() -> dict[str, Any]:
    """What a block may use without making it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(12, 8), torch.randint(4, (12,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    return {
        "torch": torch,
        "nn": nn,
        "net": net,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-3),
        "criterion": nn.CrossEntropyLoss(),
        "loader": loader,
        "module": Module(net),
        "recurrent_module": Module(nn.Sequential(nn.Unflatten(1, (4, 2)), nn.GRU(2, 4), LastState())),
        "sequences": torch.randn(20, 2, 3),
        "images": torch.randn(2, 1, 8, 8),
    }


class LastState(nn.Module):
    def forward(self, outputs: Any) -> Any:
        return outputs[0][:, -1]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and a Trainer that ends soon."""

    class Trainer(lightning.pytorch.Trainer):
        def __init__(self, **options: Any) -> None:
            quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
            short = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False}
            super().__init__(**{**quiet, **short, **options})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(lightning.pytorch, "Trainer", Trainer)
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()


@pytest.mark.parametrize("block", [pytest.param(b, id=f"{name_of(b.page)}:{b.line}") for b in BLOCKS if not b.marks])
@pytest.mark.usefixtures("workplace")
def test_a_block_runs_and_prints_what_the_page_says(block: Block) -> None:
    out = io.StringIO()
    code = compile("\n" * block.line + block.code, str(block.page), "exec")
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", DifferenceWarning)
        warnings.simplefilter("error", NoEffectWarning)
        exec(code, names())
    if block.printed is not None:
        assert out.getvalue().rstrip() == block.printed.rstrip()


def test_blocks_that_do_not_run_are_counted() -> None:
    assert {block.marks for block in BLOCKS} <= {"", "no-run"}
    marked = [name_of(block.page) for block in BLOCKS if block.marks]
    assert {page: marked.count(page) for page in marked} == NOT_RUN
    for block in BLOCKS:
        compile(block.code, str(block.page), "exec")


def test_quoted_lines_are_those_of_the_script_in_that_order() -> None:
    for page in PAGES:
        quotes = QUOTE.findall(text := page.read_text(encoding="utf-8"))
        assert len(quotes) == text.count("<!-- from examples/"), page
        for script, code in quotes:
            there = iter((ROOT / script).read_text(encoding="utf-8").replace("\n    ", "\n").splitlines())
            for line in textwrap.dedent(code).splitlines():
                assert line == "..." or line in there, f"{name_of(page)}: {script} has no such line here: {line}"


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_links_and_names_of_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}: there is no such heading"
    for file in FILE.findall(text):
        assert (ROOT / file).exists() or (page.parent / file).exists(), f"{name_of(page)} names {file}"


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_tables_have_short_cells(page: Path) -> None:
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", re.sub(r"<!--.*?-->", "", line)):
                most = FRONT_PAGE_WORDS if page == FRONT_PAGE else MOST_WORDS
                assert len(cell.split()) <= most, f"{name_of(page)}: {cell.strip()}"


def test_the_front_page_is_short() -> None:
    assert len(FRONT_PAGE.read_text(encoding="utf-8").splitlines()) <= FRONT_PAGE_LINES


QUESTIONS = {
    "What is it?": "makes one PyTorch training step faster, or smaller",
    "Does the result of training change?": "What cannot be kept equal is never silently different",
    "Does it run on a GPU?": "No GPU has run it yet",
    "How is it installed, and what does it need?": "Not on PyPI: install from a clone",
    "I run out of memory: what do I take?": r"train in less memory .*`memory_budget`",
    "DDP waits for the network: what do I take?": r"slow links .*`ooo_ddp`",
    "Does it do pipelines, or several devices?": r"a model over several ranks.*`ooo_pipeline`",
    "How much memory will training take?": r"`retime plan .*says .*memory",
    "What do I lose when I take it in the wrong place?": "measured; where it loses",
    "I clip gradients by norm: does it still work?": "turns it off .*clipping by norm",
    "How do I use it where I train?": "Lightning; .*A bare loop:.*Accelerate:.*transformers;",
    "How do I see what it did?": r"trainer\.strategy\.report\(\)",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_front_page_answers_what_a_newcomer_asks(question: str) -> None:
    page = " ".join(FRONT_PAGE.read_text(encoding="utf-8").split())
    assert re.search(QUESTIONS[question], page)


def test_mechanisms_have_cards() -> None:
    rooms = [folder for folder in (ROOT / "mechanisms").iterdir() if (folder / "__init__.py").exists()]
    assert [room.name for room in rooms if not (room / "README.md").exists()] == []
    budgets = ROOT / "mechanisms" / "memory_budget"
    inside = [folder.name for folder in budgets.iterdir() if (folder / "__init__.py").exists()]
    card = (budgets / "README.md").read_text(encoding="utf-8")
    assert [name for name in inside if f"`{name}/`" not in card] == []


def test_cards_have_every_option() -> None:
    api, start = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "start.md"))
    rows = [(one, room, "retime") for one, room in re.findall(r"`(\w+Strategy)` \|.*/(\w+)/README", start)]
    rows += [(one, room, f"retime.mechanisms.{room}") for room, one in [*BARE.findall(api), FUSE]]
    rows += [(one, room, "retime") for room, one in (other.split(".") for other in OTHERS)]
    above = (getattr(lightning.pytorch.strategies, name) for name in ("DDPStrategy", "SingleDeviceStrategy"))
    given = GIVEN.union(*(inspect.signature(one).parameters for one in [*above, nn.parallel.DistributedDataParallel]))
    for one, room, module in rows:
        (card,) = ROOT.glob(f"*/{room}/README.md")
        words = re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", card.read_text(encoding="utf-8"))))
        assert {*inspect.signature(getattr(importlib.import_module(module), one)).parameters} - given <= {*words}, one


@pytest.mark.parametrize("face", ["retime", "retime.integrations.accelerate", "retime.integrations.transformers"])
def test_the_api_page_has_every_object(face: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    there = re.findall(rf"^\.\. auto\w+:: {face}\.(\w+)$", page, re.MULTILINE)
    assert {*importlib.import_module(face).__all__} <= {*there}


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)"></a>', text))


@pytest.mark.skipif(not SITE or CHROMIUM is None, reason=NO_CHROMIUM if SITE else "no site here: make docs")
def test_no_page_of_the_site_complains_or_scrolls_sideways(tmp_path: Path) -> None:
    with Browser(tmp_path / "browser") as browser:
        for page in SITE:
            browser.open(page, 1200)
            for width, dark in ((1200, False), (1200, True), (400, True), (400, False)):
                browser.resize(width, dark=dark)
                fits = browser.run("document.documentElement.scrollWidth <= innerWidth")
                assert (fits, browser.errors) == (True, []), (page, width, dark)
