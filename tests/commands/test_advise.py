"""`retime advise`: what it concludes from times, what it prints and writes, and bad arguments; without processes."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections import Counter
from copy import deepcopy
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import retime
from retime import callbacks, mechanisms, modules
from retime.commands import advise, advise_worker
from retime.commands.advise_turns import MethodError, no_effect
from retime.commands.advise_worker import DDP, METHODS, PLAIN, Method, ScanChains, methods_for
from retime.commands.main import main
from retime.foundations.messages import NoEffectWarning
from retime.integrations import accelerate, transformers
from retime.mechanisms.memory_budget import BudgetedStep, parse_host
from retime.mechanisms.two_streams import TwoStreamBackward
from retime.schedules.budget import BudgetError
from retime.strategies import STRATEGIES
from support.browser import CHROMIUM, NO_CHROMIUM, Browser, click_through

MIB = 2**20
FACTS = {"model": "Net", "is_lightning": True, "parameters": 1234, "samples": 8, "chains": ["net", "net.head"]}
FACTS |= {"no_scan": "there is no chain to scan", "no_chain": ""}
NOTHING = "backward fusion has no effect on these steps: the norm of all gradients is clipped"


class Fake:
    """Stands for processes: a step takes what `times` says for its method, peaks what `peaks` says."""

    times: dict[str, float]
    peaks: dict[str, int]
    said: dict[str, list[tuple[str, str]]]
    refused: dict[str, str]
    silent_blocks = 0
    interrupt_at: str
    started: list[tuple[str, dict[str, Any], dict[str, str] | None, int]]
    blocks: Counter[tuple[str, int, bool]]

    def __init__(
        self, _: Any, request: dict[str, Any], environment: dict[str, str] | None, ranks: int, limit: Any
    ) -> None:
        if "layers" in request:
            self.first = {"layers": [(1.0, 1.0, 1.0, 4 * MIB)] * 6}
            return
        method: Method = request["method"]
        self.name = next((name for name, one in {"plain": PLAIN, "ddp": DDP, **METHODS}.items() if one == method), "")
        self.name = self.name or method.callback or "{} {}".format(*next(iter(method.arguments.items())))
        self.name += " of each rank" * (method.strategy == "MemoryBudgetDDPStrategy")
        Fake.started.append((self.name, request, environment, ranks))
        self.is_busy, self._turns, self._blocks = False, count(), 0
        self._kept = bool(environment) or request["keep_heap"]
        self._threads, self._fused = request["threads"], request["fused"]
        if self.name == Fake.interrupt_at:
            raise KeyboardInterrupt
        if self.name in Fake.refused:
            raise MethodError(Fake.refused[self.name])
        self.first = {**self._answer(2), **FACTS, "optimizers": ["AdamW"], "has_fused": True}

    def _answer(self, steps: int) -> dict[str, Any]:
        ms = Fake.times.get(self.name, 10.0) * (1 + 0.001 * (next(self._turns) % 3))
        ms *= 1.0 if self._fused else 1.5
        ms *= 1.0 if self._threads == 1 or self.name != "plain" else 1.2
        ms *= 1.0 if self._kept or self.name != "plain" else 1.1
        spans = [[[("forward", 0.0, ms / 3), ("backward", ms / 3, ms / 3), ("update", 2 * ms / 3, ms / 3)]] * 3]
        said = Fake.said.get(self.name, []) * (self._blocks >= Fake.silent_blocks)
        peak = Fake.peaks.get(self.name, 100 * MIB)
        answer = {"ms": [ms] * steps, "peak_bytes": peak, "said": said}
        return {**answer, "report": f"report of {self.name}", "spans": spans}

    def steps(self, limit: Any, steps: int, **more: Any) -> dict[str, Any]:
        self._threads, self._fused = more.get("threads", self._threads), more.get("fused", self._fused)
        return self._answer(steps)

    def block(self, limit: Any, step_ms: float, **more: Any) -> tuple[float, int]:
        answer = self.steps(limit, 1, **more)
        self._blocks += 1
        Fake.blocks[self.name, self._threads, self._fused] += 1
        return answer["ms"][0], answer["peak_bytes"]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.times, Fake.peaks, Fake.said, Fake.refused = {}, {}, {}, {}
    Fake.silent_blocks, Fake.interrupt_at, Fake.started, Fake.blocks = 0, "none", [], Counter()
    monkeypatch.setattr(advise, "Running", Fake)
    monkeypatch.setattr(advise.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(advise.torch, "get_num_threads", lambda: 2)


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    files = "--json", str(folder / "advice.json"), "--html", str(folder / "advice.html")
    status = main(["advise", "models:net", *files, *arguments])
    return status, json.loads((folder / "advice.json").read_text()), (folder / "advice.html").read_text()


def charts_in(page: str) -> Any:
    """The timelines of a page."""
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert inside
    return json.loads(inside[1])["charts"]


def verdicts(whole: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in whole["methods"]}


def test_it_finds_the_strongest_plain_step_and_compares_with_it(tmp_path: Path) -> None:
    Fake.times = {"fused_optimizer": 9.0}
    _, whole, _ = run(tmp_path)
    assert whole["plain"]["strongest"] == {"threads": 1, "fused": True, "kept_heap": True}
    assert whole["plain"]["as_it_is"] == "2 threads"
    assert whole["plain"]["as_it_is_ms"] == pytest.approx(10 * 1.5 * 1.2 * 1.1, rel=0.01)
    _, request, environment, ranks = next(one for one in Fake.started if one[0] == "fused_optimizer")
    assert (request["threads"], request["fused"], ranks) == (1, True, 1)
    assert (request["keep_heap"], environment) == (True, None)
    pool = next(request for name, request, _, _ in Fake.started if name == "CPUMemoryPool")
    assert not pool["keep_heap"]  # it is an allocator itself
    _, request, environment, _ = [one for one in Fake.started if one[0] == "fused_optimizer"][-1]  # is to be advised
    assert not request["keep_heap"]
    assert "MALLOC_TRIM_THRESHOLD_" in (environment or {})
    assert next(one for one in Fake.started if one[0] == "ooo_single_device")[1]["threads"] == 2
    assert next(one for one in Fake.started if one[0] == "ooo_ddp")[3] == 2
    assert {f"budget {50 * MIB}", f"budget {50 * MIB} of each rank"} < {one[0] for one in Fake.started}


def test_what_is_much_slower_takes_fewer_rounds(tmp_path: Path) -> None:
    Fake.times = {"fused_optimizer": 20.0, "fused_optimizer_forward": 10.6}
    _, whole, _ = run(tmp_path)
    rounds = {row["name"]: len(row["gain"]["rounds"]) for row in whole["methods"] if row["gain"]}
    assert (rounds["fused_optimizer"], rounds["fused_optimizer_forward"]) == (5, 9)
    assert Fake.blocks["plain", 2, False] == 6, "with either heap, one that is not counted and two"
    assert Fake.blocks["plain", 2, True] == 9, "not so far behind with the kept heap"


def test_the_fastest_is_measured_twice_and_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.times = {"fused_optimizer": 8.0, "fused_optimizer_forward": 9.0, "ooo_single_device": 11.0}
    status, whole, page = run(tmp_path)
    assert status == 0
    assert whole["advised"] == "fused_optimizer"
    assert [one[0] for one in Fake.started].count("fused_optimizer") == 2
    assert [one[0] for one in Fake.started].count("fused_optimizer_forward") == 1
    shown = verdicts(whole)
    assert shown["fused_optimizer_forward"] == "faster"
    assert shown["ooo_single_device"] == "slower"
    assert shown["convert (scan modules)"] == "does not apply"
    assert list(shown)[:2] == ["fused_optimizer", "fused_optimizer_forward"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == 'Trainer(strategy="fused_optimizer")'.replace('"', "'")
    assert max(map(len, lines)) <= 100
    assert any("1.25 (" in line and "faster" in line for line in lines)
    assert "fused_optimizer" in page


@pytest.mark.parametrize(
    "times",
    [
        "8 10.5 0 undecided",
        "9.7 9.7 0 undecided",
        "5 9.7 0 undecided",
        "8 9 0 faster",
        "8 9 1 faster",
        "8 9 2 undecided",
    ],
)
def test_both_measurements_have_to_say_so(times: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, lost, verdict = times.split()
    plain = advise._Measuring._measured

    def slower_later(self: Any, name: str, method: Method, *, show: bool = False) -> Any:
        Fake.times["fused_optimizer"] = float(second if show else first)
        row = plain(self, name, method, show=show)
        if name == "fused_optimizer":
            assert row.gain is not None
            row.gain = advise.spread([0.99] * int(lost) + row.gain.rounds[int(lost) :])
            assert advise.judged(row.gain) == row.verdict
        return row

    monkeypatch.setattr(advise._Measuring, "_measured", slower_later)
    _, whole, _ = run(tmp_path)
    row = next(row for row in whole["methods"] if row["name"] == "fused_optimizer")
    assert (row["verdict"], row["is_steady"]) == (verdict, first == second)
    assert whole["advised"] == ("fused_optimizer" if verdict == "faster" else None)


def test_without_effect_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.times = {"fused_optimizer": 5.0}
    Fake.said = {"fused_optimizer": [("NoEffectWarning", NOTHING)]}
    Fake.refused = {"ooo_pipeline": "my_model.py, line 3, in forward: PipelineError: no list of layers"}
    _, whole, _ = run(tmp_path)
    assert verdicts(whole)["fused_optimizer"] == "no effect"
    assert whole["advised"] is None
    said = capsys.readouterr().out
    assert " ".join(said.split()).count(NOTHING) == 1
    assert "PipelineError: no list of layers" in said
    assert said.splitlines()[-1] == "Trainer()"


def test_a_method_that_takes_itself_off_while_it_is_measured_has_no_effect(tmp_path: Path) -> None:
    Fake.times, Fake.silent_blocks = {"ooo_single_device": 5.0}, 3
    Fake.said = {"ooo_single_device": [("NoEffectWarning", "two streams do not pay here and are taken off")]}
    _, whole, _ = run(tmp_path)
    assert verdicts(whole)["ooo_single_device"] == "no effect"
    assert whole["advised"] is None


def test_ddp_that_does_not_run_leaves_the_others(tmp_path: Path) -> None:
    Fake.refused = {"bucket_cap_mb 25": "a parameter was not used"}
    Fake.times = {"fused_optimizer": 8.0}
    status, whole, _ = run(tmp_path)
    assert (status, whole["advised"]) == (0, "fused_optimizer")
    row = next(row for row in whole["methods"] if row["name"] == "ooo_ddp")
    assert row["why"] == "ddp does not run beside it: a parameter was not used"


def test_ddp_has_the_fastest_of_its_buckets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake.times = {"bucket_cap_mb 4": 8.0, "cpu_accumulate_ddp": 9.0}
    monkeypatch.setitem(FACTS, "parameters", 6 * MIB)
    _, whole, _ = run(tmp_path)
    assert list(whole["plain"]["ddp_tried_ms"]) == ["25", "1", "4"]  # 100 MiB hold what 25 MiB hold
    assert whole["plain"]["ddp_ms"] == pytest.approx(8, rel=0.01)
    assert verdicts(whole)["cpu_accumulate_ddp"] == "slower"
    assert "its buckets 4 MiB, the fastest of 1, 4, 25" in " ".join(capsys.readouterr().out.split())


def test_methods_of_ranks_are_advised_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.times = {"cpu_accumulate_ddp": 8.0}
    _, whole, _ = run(tmp_path)
    assert (whole["advised"], whole["advised_on_ranks"]) == (None, "cpu_accumulate_ddp")
    line = (
        "cpu_accumulate_ddp has 1.25 (1.25 to 1.25) times its speed: Trainer(strategy='cpu_accumulate_ddp', devices=2)"
    )
    assert line in " ".join(capsys.readouterr().out.split())


def test_a_smaller_budget_than_a_refused_one_is_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "a budget of 52428800 bytes is below this step's floor: at least 1.5 MiB are needed at 'net.1'. More."
    Fake.refused = {f"budget {50 * MIB}": "it took longer than --seconds 60: give more"}
    assert run(tmp_path)[1]["methods"][-1]["why"] == "a budget as large took too long to plan already"
    Fake.refused = {f"budget {50 * MIB}": why}
    _, whole, _ = run(tmp_path)
    assert f"budget {25 * MIB}" not in [one[0] for one in Fake.started]
    assert next(row["why"] for row in whole["methods"] if row["name"] == "memory_budget, 50 % of peak") == why
    said = " ".join(capsys.readouterr().out.split())
    assert "at least 1.5 MiB are needed at 'net.1' memory_budget, 25 % of peak: a budget as large was too small" in said


def test_one_device(tmp_path: Path) -> None:
    _, whole, _ = run(tmp_path, "--devices", "1")
    row = next(row for row in whole["methods"] if row["name"] == "ooo_pipeline")
    assert row["why"] == "it needs two ranks: give --devices 2"


def test_memory_that_nothing_fits_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--memory", "1MiB")
    said = capsys.readouterr().out
    assert "Nothing that was measured fits into 1 MiB: retime plan says" in " ".join(said.split())
    assert said.splitlines()[-1] == "retime plan"


def test_the_step_as_it_is_is_compared_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    assert "strongest plain step: 1.98 times the speed of the step as it is" in " ".join(
        capsys.readouterr().out.split()
    )
    Fake.times = {"fused_optimizer": 5.0}
    run(tmp_path)
    assert "plain step, 3.96 times that of the step as it is" in " ".join(capsys.readouterr().out.split())


def test_memory_bounds_what_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.times = {"fused_optimizer": 8.0, f"budget {40 * MIB}": 12.0}
    Fake.peaks = {f"budget {40 * MIB}": 39 * MIB}
    Fake.peaks[f"budget {40 * MIB} of each rank"] = 38 * MIB
    _, whole, _ = run(tmp_path, "--memory", "40MiB")
    assert whole["advised"] == "memory_budget, --memory"
    assert whole["advised_on_ranks"] == "memory_budget_ddp, --memory"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Trainer(strategy=retime.MemoryBudgetStrategy(budget={40 * MIB}))"
    assert any("the strongest plain step does not fit, ddp does not fit" in line for line in lines)


def test_a_slow_network_is_simulated_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole, _ = run(tmp_path, "--network", "1gbit", "--ranks", "4")
    row = next(row for row in whole["methods"] if row["name"] == "ooo_ddp, 4 machines")
    assert row["verdict"] == "simulated"
    assert row["gain"]["low"] <= row["gain"]["median"] <= row["gain"]["high"]
    assert row["gain"]["median"] > 1
    assert "take 170% of the measured step" in " ".join(capsys.readouterr().out.split())
    assert whole["advised_on_ranks"] is None


def test_ctrl_c_gives_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.times, Fake.interrupt_at = {"fused_optimizer": 8.0}, "ooo_single_device"
    status, whole, page = run(tmp_path)
    assert (status, whole["interrupted"], whole["advised"]) == (130, True, "fused_optimizer")
    out = capsys.readouterr().out
    assert "measured once only" in out
    assert "fused_optimizer" in page


def test_ctrl_c_before_anything_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fake.interrupt_at = "plain"
    status, whole, page = run(tmp_path)
    assert (status, whole["advised"], whole["methods"]) == (130, None, [])
    assert capsys.readouterr().out == "nothing was measured yet\n"
    assert "Nothing was measured yet" in page
    assert charts_in(page) == []


def test_a_bare_loop_gets_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTS, "is_lightning", False)
    Fake.times = {"fused_optimizer": 8.0}
    run(tmp_path)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == 'retime.fuse_optimizer(model, optimizer, mode="backward")'
    assert out.splitlines()[-2] == "First: import retime, retime.integrations.accelerate"
    assert "With Accelerate: retime.integrations.accelerate.FusedOptimizer" in " ".join(out.split())


class Checker(HTMLParser):
    """Every element that is opened is closed, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, value in attributes if value != "data:,"}
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    Fake.times = {"fused_optimizer": 8.0}
    Fake.refused = {"ooo_pipeline": "a <b> & no list"}
    _, whole, page = run(tmp_path)
    checker = Checker()
    checker.feed(page)
    assert checker.open == ["html"]
    assert checker.seen.count("tr") == 1 + len(whole["methods"])
    (chart,) = charts_in(page)
    assert chart["lanes"] == ["plain", "fused_optimizer"]
    assert [name for name, *_ in chart["spans"]] == ["forward", "backward", "update"] * 2
    assert "a &lt;b&gt; &amp; no list" in page


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_sorts_the_methods_and_zooms(tmp_path: Path) -> None:
    Fake.times = {"fused_optimizer": 8.0, "ooo_single_device": 11.0}
    run(tmp_path)

    def sorts(browser: Browser) -> None:
        assert browser.run("document.querySelector('.scroll').scrollWidth <= document.body.clientWidth")
        first = "document.querySelector('tbody td').textContent"
        assert browser.run(first) == "fused_optimizer"
        for _ in range(2):
            browser.click("th:nth-child(2) button")  # by speed, the other way round the second time
        assert browser.run(first) != "fused_optimizer"

    assert click_through(tmp_path / "advice.html", tmp_path / "clicked", sorts) == []


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--devices", "0"), "--devices 0: give 1 to"),
        (("--seconds", "0"), "--seconds 0: give 1 or more"),
        (("--seconds", "nan"), "--seconds nan"),
        (("--memory", "lots"), "--memory='lots' cannot be read"),
        (("--network", "fast"), "rate='fast' is no link rate"),
        (("--ranks", "8"), "--ranks 8 is about a network: give --network too"),
        (("--network", "1gbit", "--ranks", "1"), "--ranks 1: give 2 machines or more"),
        (("--json", "/no/such/file.json"), "--json /no/such/file.json: there is no folder /no/such"),
        (("--html", "/no/such/file.html"), "--html /no/such/file.html: there is no folder"),
        (("--json", "."), "--json . is a folder: name a file in it"),
        (("--only", "fusion"), "--only fusion: give one of 'fused_optimizer'"),
        (("--trainer", "nothing=1"), "--trainer nothing=1: write an argument of Trainer"),
        (("--trainer", "limit_val_batches=2"), "--trainer limit_val_batches=2"),
        (("--trainer", "precision"), "--trainer precision"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], pattern: str) -> None:
    assert main(["advise", "models:net", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("retime advise: ")
    assert pattern in line
    assert not Fake.started


def test_an_unknown_option_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "models:net", "--secnods", "3"])
    assert "retime advise: unrecognized arguments: --secnods" in capsys.readouterr().err


def test_what_the_trainer_is_told_goes_to_all(tmp_path: Path) -> None:
    run(tmp_path, "--trainer", "gradient_clip_val=1.0", "--trainer", "precision=bf16-mixed")
    assert {tuple(one[1]["trainer"].items()) for one in Fake.started} == {
        (("gradient_clip_val", 1.0), ("precision", "bf16-mixed"))
    }


def test_a_plain_step_that_does_not_run_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Fake.refused = {"plain": "models.py, line 3, in forward: ZeroDivisionError: no"}
    assert main(["advise", "models:net"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "retime advise: the plain step does not run: models.py, line 3, in forward: ZeroDivisionError: no"
    )


ALL = methods_for(2 * MIB, MIB, ["net", ""])
LEFT_OUT = {
    "BackwardFusion, ForwardFusion, DataParallelFusion": "`fuse_optimizer` makes them",
    "FuseOptimizer": "fuses what `fused_optimizer` and `fused_optimizer_ddp` fuse, beside a strategy",
    "WeightGradientDeferral": "an order that gains nothing by itself: `ooo_ddp` and `ooo_pipeline` use it",
    "ReverseFirstK": "chooses the k of `ooo_ddp`, which chooses one itself",
    "ScanRNN, ScanGRU, ScanLSTM, convert_back": "of `convert`",
    "StepTimeline, MemoryTimeline, PipelineTimeline, PeakMemory, ScanReport, ConversionReport": "change no step",
    "DifferenceWarning, NoEffectWarning, declare_per_parameter": "no methods",
}


def test_each_method_of_the_package_has_a_row(tmp_path: Path) -> None:
    """Strategies that start processes have a name for each way to start them, `_spawn` and `_fork`, and one row."""
    rooms = [
        importlib.import_module(f"retime.mechanisms.{one.name}") for one in pkgutil.iter_modules(mechanisms.__path__)
    ]
    public = {name for face in (retime, callbacks, modules, accelerate, transformers) for name in face.__all__}
    public |= {name for room in rooms for name in room.__all__ if hasattr(getattr(room, name), "remove")}
    public |= {name for name, *_ in STRATEGIES}
    texts = [text for one in ALL.values() for text in (one.trainer(2, {}), one.bare, one.accelerate)]
    named = {word for text in texts for word in re.findall(r"\w+", text)}
    named |= {name for name, kind, *_ in STRATEGIES if kind.__name__ in named}
    named |= {kind.__name__ for name, kind, *_ in STRATEGIES if name in named}
    assert public - named == {name for names in LEFT_OUT for name in names.split(", ")}
    assert verdicts(run(tmp_path, "--memory", "1MiB")[1]).keys() == ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_what_is_to_be_pasted_takes_its_arguments(name: str) -> None:
    method = ALL[name]
    for text in (method.trainer(2, {}), method.bare, method.accelerate):
        text = text.partition("  #")[0].removeprefix("with ").removesuffix(":")
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            first, *path = ast.unparse(call.func).split(".")
            if path:
                function = pkgutil.resolve_name(".".join(["torch.nn.Module" if first == "model" else first, *path]))
                bound = [None] if first == "model" else []
                inspect.signature(function).bind(*bound, *call.args, **{one.arg: one.value for one in call.keywords})
    assert method.options()["strategy"] is not None


def test_warnings_and_refusals_that_decide_are_those_that_methods_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command looks for in their texts, in the words that they have today."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    two_streams = TwoStreamBackward(net)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.warns(NoEffectWarning) as warned:
        net(torch.ones(2, 4)).sum().backward()
    two_streams.remove()
    assert no_effect([("NoEffectWarning", str(warned[0].message))])
    step = BudgetedStep(net, [], 1, parse_host(None, torch.device("cpu")))
    with pytest.raises(BudgetError, match=next(iter(advise._IN_VAIN))):
        step.plan(lambda batch: net(batch).mean(), torch.ones(8, 4))
    step.remove()


class Chains(nn.Module):
    """Calls a chain, in which another one lies, and the layers of a second one by one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(4))
        self.listed = nn.Sequential(nn.Linear(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.listed[0](self.called(inputs))


def test_chains_scan_with_the_gradients_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, limits = Chains(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), list[Any]()
    plain, scans, inputs = deepcopy(model), ScanChains(), torch.ones(2, 4)
    monkeypatch.setattr(advise_worker.resource, "setrlimit", lambda *limit: limits.append(limit[1][0]))
    scans.setup(None, model, "fit")  # type: ignore[arg-type]
    assert psutil.Process().memory_info().data < limits[0] < psutil.virtual_memory().total
    with pytest.warns(NoEffectWarning, match="1 of 4 layers of ScanSequential run in plain autograd: 1: LayerNorm"):
        model(inputs).square().sum().backward()
    scans.on_train_batch_end(None, model, None, None, 0)  # type: ignore[arg-type]
    assert scans.report().startswith("parallel-scan backward: 3 layers in 1 scans")
    plain(inputs).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with pytest.raises(MemoryError, match="its layers' Jacobians need more than"):
        scans.on_exception(None, None, RuntimeError("DefaultCPUAllocator: can't allocate memory"))  # type: ignore[arg-type]


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.filterwarnings("ignore::retime.NoEffectWarning")
def test_chains_of_which_nothing_is_scanned_have_no_effect(called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scans = Chains(), ScanChains()
    model.called = model.called if called else nn.Identity()
    monkeypatch.setattr(advise_worker.resource, "setrlimit", lambda *_: None)
    scans.setup(None, model, "fit")  # type: ignore[arg-type]
    model(torch.ones(2, 4))
    why = "1 LayerNorm has no analytic Jacobian here" if called else "no torch.nn.Sequential is called as a whole"
    with pytest.warns(NoEffectWarning, match=f"ScanSequential has no effect on these steps: {why}"):
        scans.on_train_batch_end(None, model, None, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ooo_single_device", "ooo_single_device + updates"])
def test_two_streams_have_searched_before_they_are_timed(name: str) -> None:
    """What is timed, and what is said of it, is of the setting that the search has chosen."""
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    two_streams = TwoStreamBackward(net)
    reports = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(METHODS[name].warm_steps):
            net(torch.randn(4, 16)).sum().backward()
            reports.append(str(two_streams.report()))
    two_streams.remove()
    torch.set_num_threads(threads)
    assert "still searching" in reports[0]
    assert "still searching" not in reports[-1]
