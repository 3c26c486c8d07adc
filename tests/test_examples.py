"""Examples are the plain script with a few marked lines, train to the plain script's loss, and leave out no object."""

import contextlib
import functools
import importlib
import io
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import retime
from retime.strategies import STRATEGIES
from support.time_limits import limit_s

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.py") if not path.name.startswith("plain"))
TWO_RANKS = re.compile("_ddp|_on_host|cpu_accumulate|pipeline|reverse_first_k")
PLANS = re.compile("memory_budget[.]|memory_timeline|offload")  # which are searched for, for ten seconds
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SHORT = ("--epochs", "1", "--samples", "96")
TORN_DOWN = "terminate called without an active exception"  # torch: gloo's thread drops a tensor as Python ends
LOSS = re.compile(r"loss (\d+\.\d{4})")  # two ranks may write into one line
NO_EXAMPLE = {
    **dict.fromkeys(("DifferenceWarning", "NoEffectWarning"), "a warning"),
    **dict.fromkeys(("ScanLSTM", "ScanRNN"), "given like ScanGRU"),
    "OutOfOrderPipeline of transformers": "always refused",
    "convert of transformers": "GPT-2 has no recurrent layer; docs/questions/rnns_on_a_cpu.md has code",
}


def name_of(script: Path) -> str:
    return script.relative_to(EXAMPLES).as_posix()


def base_of(script: Path) -> Path:
    """Return the plain script that an example begins with."""
    has_ranks = "# DDP" in script.read_text(encoding="utf-8") and script.name != "plain_ddp.py"
    return script.with_name("plain_ddp.py" if has_ranks else "plain.py")


@pytest.mark.parametrize("script", [*SCRIPTS, *EXAMPLES.glob("*/plain_ddp.py")], ids=name_of)
def test_an_example_is_the_plain_script_with_marked_lines(script: Path) -> None:
    """But for the docstring. A marked ``with`` indents lines, and a marked comment has the line that it replaces."""
    mark = "DDP" if script.name == "plain_ddp.py" else "retime"
    plain, example = (one.read_text(encoding="utf-8").splitlines()[1:] for one in (base_of(script), script))
    kept = [line.replace(f"# {mark} replaces: ", "") for line in example if not line.endswith(f"# {mark}")]
    assert [line.strip() for line in kept if line] == [line.strip() for line in plain if line]
    assert 1 <= sum(line.endswith(f"# {mark}") for line in example) <= 9


def losses(script: Path, ranks: int) -> list[str]:
    if ranks > 1:
        launcher = () if script.parent.name == "lightning" else TORCHRUN  # Lightning starts the second by itself
        command = [sys.executable, *launcher, str(script), *SHORT]
        for _ in range(2):
            ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(120), check=False)
            if TORN_DOWN not in ran.stderr:
                break
        assert ran.returncode == 0, ran.stderr
        return sorted(LOSS.findall(ran.stdout))
    printed = io.StringIO()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", retime.NoEffectWarning)
        patch.setattr(sys, "argv", [str(script), *SHORT])
        runpy.run_path(str(script), run_name="__main__")
    return LOSS.findall(printed.getvalue())


plain_losses = functools.cache(losses)


LONG = {one for one in SCRIPTS if PLANS.search(one.name) or TWO_RANKS.search(one.name) or "transformers" in one.parts}


@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=[pytest.mark.long] if one in LONG else [], id=name_of(one)) for one in SCRIPTS]
)
def test_an_example_trains_as_the_plain_script(script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the loss of as many ranks under DDP; the ranks of a pipeline to that of one."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)  # which two streams need
    ranks = 2 if TWO_RANKS.search(script.name) else 1
    replicas = 1 if "pipeline" in script.name else ranks
    wanted = plain_losses(base_of(script), replicas)
    assert len(wanted) == replicas
    assert losses(script, ranks) == wanted * (ranks // replicas)


def columns_of_choose() -> dict[str, set[str]]:
    """Return the names that docs/choose.md has for each place where people train."""
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8").partition("## Where do I train?")[2]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    doors = ("lightning", "bare_loop", "accelerate", "transformers")
    return {
        door: set(re.findall(r"`(?:with )?(\w+)(?:\(\):)?`", " ".join(cells)))
        for door, cells in zip(doors, zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("door", ["lightning", "bare_loop", "accelerate", "transformers"])
def test_each_public_object_has_an_example(door: str) -> None:
    wanted, folders = columns_of_choose()[door], [door]
    if door == "lightning":
        wanted, folders = wanted | {*retime.__all__}, [door, "bare_loop"]
    elif door != "bare_loop":
        wanted |= {*importlib.import_module(f"retime.integrations.{door}").__all__}
    scripts = [one.read_text(encoding="utf-8") for one in SCRIPTS if one.parent.name in folders]
    words = set(re.findall(r"\w+", "\n".join(re.findall(r".*# retime$", "\n".join(scripts), re.MULTILINE))))
    for name, kind, *_ in STRATEGIES:
        words |= {name, kind.__name__} if words & {name, kind.__name__} else set()
    without = {one for one in NO_EXAMPLE if " of " not in one} | {one.split()[0] for one in NO_EXAMPLE if door in one}
    assert wanted - words - without == set()


def test_the_page_has_each_example_with_a_sentence() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*/*.py"):
        rows = re.findall(rf"^\| \S+ [^|]*\|.*\]\(\.\./examples/{name_of(script)}\)", page, re.MULTILINE)
        assert len(rows) == 1, name_of(script)
