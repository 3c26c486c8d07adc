"""The out-of-order recipes that measure on ranks: variants, layer times, reports, and real runs at tiny sizes."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra.errors import ConfigCompositionException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.futures import Future

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Point, Result, Row, best_of, percent_more, ratio
from retime.recipes.core.schema import Hardware
from retime.recipes.emulated import ClusterUnavailable
from retime.recipes.ooo import variants as ooo_variants
from retime.recipes.ooo.cluster import PEAK, Convergence, Memory, bound_fraction, bound_ms, identical
from retime.recipes.ooo.reverse_first_k import Hosts, Sweep, Targets, best_fixed, concavity_breaks, within_best
from retime.recipes.ooo.settings import OutOfOrderSettings, of_case
from retime.recipes.ooo.variants import PriorityReducer, label, variant
from retime.recipes.report import markdown
from support.recipes import assert_draws, settings_for
from support.time_limits import limit_s

WIDTH = 8
LINEAR_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def settings(**more: Any) -> OutOfOrderSettings:
    """Two ranks on this machine's loopback, a tiny network."""
    defaults: dict[str, Any] = {
        "name": "test",
        "hardware": Hardware("cpu", "cpu", None),
        "rate": None,
        "rounds": 1,
        "warmup_rounds": 0,
        "steps": 1,
        "batch_size": 2,
        "variants": ["ddp", "ddp_layer_buckets"],
        "model": {"_target_": "retime.recipes.models.mlp", "depth": 2, "width": WIDTH},
        "data": {"_target_": "retime.recipes.data.synthetic_vectors", "features": WIDTH, "classes": WIDTH},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "timeout_s": limit_s(100),
    }
    return OutOfOrderSettings(**{**defaults, **more})


def point(at: dict[str, Any], step_ms: dict[str, list[float]], **facts: Any) -> Point:
    cluster = {
        **{"hosts": 2, "rate_bits": 2e9, "gloo_bits": 1.8e9, "tcp_bits": 1.9e9, "batch_size": 256, "k": 4},
        **{"bucket_bytes": 26214400, "communication_processor_ms": 30.0, "update_ms": 10.0},
    }
    layers = [{"name": "0", "forward_ms": 1.0, "output_ms": 2.0, "weight_ms": 3.0, "bytes": 400}]
    found = {"cluster": cluster, "layers": layers, **facts}
    rows = [Row(name, "step", "ms", values) for name, values in step_ms.items()]
    return Point(at, {"rounds": 2, "steps": 4}, rows, found)


TIMES = {
    "ddp": [400.0, 410.0],
    "ddp_layer_buckets": [350.0, 360.0],
    "ooo_tuned": [303.0, 305.0],
    "ooo_tuned_waiting": [340.0, 345.0],
    "ooo_k0": [330.0, 332.0],
    "ooo_k4": [300.0, 302.0],
    "compute": [240.0, 241.0],
    "communication": [230.0, 245.0],
}
SEARCH = {"k": 4, "path": [[0, 330.0], [4, 300.0]], "steps": 9, "report": "..."}
IDENTICAL = "final weights bit-identical to ddp, on all ranks"


@pytest.mark.parametrize(
    ("name", "k", "cross_iteration", "layer_buckets"),
    [
        ("ddp", None, True, False),
        ("ddp_layer_buckets", None, True, True),
        ("ooo_k12", 12, True, False),
        ("ooo_auto", "auto", True, False),
        ("ooo_tuned_waiting", "tuned", False, False),
        ("ooo_k3_waiting_layer_buckets", 3, False, True),
        ("ddp_tuned_buckets", None, True, False),
        ("priority_4", None, True, True),
    ],
)
def test_variants_say_what_they_are(name: str, k: int | str | None, cross_iteration: bool, layer_buckets: bool) -> None:
    found = variant(name)
    assert (found.k, found.cross_iteration, found.layer_buckets) == (k, cross_iteration, layer_buckets)
    assert label(name)


@pytest.mark.parametrize("name", ["dpd", "ooo", "ooo_k", "ddp_waiting", "ooo_k-1", "priority_waiting", "priority_0"])
def test_unknown_variants_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"variant '{name}' is unknown: write ddp"):
        variant(name)


def test_plain_variants_are_lightnings_own() -> None:
    small = variant("ddp_layer_buckets").strategy(4.5)
    assert type(small) is DDPStrategy
    assert small._ddp_kwargs == {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 4.5}
    with pytest.raises(ValueError, match="ooo_tuned needs the k of a search"):
        variant("ooo_tuned").strategy(4.5)


def test_bounds_and_ratios_are_formed_within_rounds() -> None:
    measured = point({}, TIMES)
    assert bound_ms(measured) == [240.0, 245.0]
    share, speed = bound_fraction(measured, "ooo_k4"), ratio(measured, "ddp", "ooo_k4")
    assert share.rounds == [240 / 300, 245 / 302]
    assert speed.rounds == [400 / 300, 410 / 302]
    assert ratio(measured, "ddp", "ooo_k7") is None
    assert best_of(measured, "ddp", "step") == "ddp_layer_buckets"
    assert best_fixed(measured) == "ooo_k4"
    slower = within_best(measured)
    assert slower.rounds == pytest.approx([1.0, 100 * 3 / 302])


def test_concave_curves_are_told_from_others() -> None:
    assert concavity_breaks({0: 1.0, 1: 1.1, 2: 1.3, 3: 1.2}) == 0
    assert concavity_breaks({0: 1.0, 1: 1.1, 2: 1.105, 3: 1.1, 4: 1.102}) == 0  # within noise
    assert concavity_breaks({0: 1.0, 1: 0.9, 2: 1.3, 3: 1.1, 4: 1.2}) == 2


def test_identical_means_every_time_and_on_every_rank() -> None:
    first = {"weights": {"ddp": ["a"], "ooo_k0": ["a"], "ooo_k1": ["a"], "ooo_k2": ["a", "b"]}}
    other = {"weights": {"ddp": ["a"], "ooo_k0": ["a"], "ooo_k1": ["b"], "ooo_k2": ["a", "b"]}}
    assert identical([first, other]) == ["ddp", "ooo_k0"]
    statistics = {
        "weights": {"ddp": ["c"], "ooo_k0": ["c"], "ooo_k1": ["a"], "ooo_k2": ["c"]}
    }  # BatchNorm's of its rank
    assert identical([first, statistics]) == ["ddp", "ooo_k0"]
    assert identical([first, {"weights": {**first["weights"], "ddp": ["a", "c"]}}]) == []  # ddp itself differs
    assert identical([{"weights": {"ooo_k0": ["a"]}}]) == []


def targets_result() -> Result:
    names = "ddp, ddp_layer_buckets, ooo_tuned, ooo_tuned_waiting, ooo_k0, ooo_k4"
    peaks = [Row("ddp", PEAK, "MiB", [200.0]), Row("ooo_k4", PEAK, "MiB", [202.0])]
    points = [
        point({"case": "mlp"}, TIMES, search=SEARCH, **{IDENTICAL: names}),
        point({"case": "identical_sgd"}, TIMES, **{IDENTICAL: names}),
        point({"case": "identical_adamw"}, TIMES, **{IDENTICAL: "ddp"}),
        Point({"case": "memory"}, {}, peaks, {"k": 4, "gradient bytes": 50 * 2**20}),
    ]
    return Result("t", "retime.recipes.ooo.reverse_first_k.Targets", "ooo-backprop", "Targets", "targets", points)


def test_targets_are_held_against_the_table() -> None:
    verdicts = {line.cells()[1]: line.cells() for line in Targets().compare(targets_result())}
    assert len(verdicts) == 6
    assert "met" in verdicts["mlp: out of order over Lightning's ddp"][4]
    assert "over DDP, small buckets" in verdicts["mlp: out of order over Lightning's ddp"][4]
    assert "met; ddp 0.6" in verdicts["mlp: share of the bound max(compute, communication) reached"][4]
    assert "auto k=4, best ooo_k4" in verdicts["mlp: k='auto' slower than the best k of a full sweep"][4]
    assert verdicts["mlp: steps that k='auto' took to decide"][3].startswith("9.00")
    assert "MISSED" in verdicts["runs with final weights bit-identical to ddp"][4]
    assert verdicts["mlp: extra peak memory, reverse-first-k, k = 4 (1 % plus one bucket)"][4] == "met"


def results() -> dict[str, tuple[Recipe[Any], Result]]:
    def result(*points: Point) -> Result:
        return Result("t", "recipe", "ooo-backprop", "Figure", "title", list(points))

    losses = [Row(name, "loss", "nats", [2.0, 1.0, 0.5]) for name in ("ddp", "ooo_k3")]
    converged = Point({"case": "digits"}, {}, losses)
    peaks = [Row("ddp", PEAK, "MiB", [200.0]), Row("ooo_k3", PEAK, "MiB", [203.0])]
    memory = Point({"case": "mlp"}, {}, peaks, {"gradient bytes": 2**20})
    hosts = [point({"hosts": 2, "compute": kind}, TIMES) for kind in ("real", "emulated")]
    return {
        "targets": (Targets(), targets_result()),
        "sweep": (Sweep(), result(point({}, TIMES, search=SEARCH))),
        "convergence": (Convergence(), result(converged)),
        "two cases of convergence": (Convergence(), result(converged, converged)),
        "memory": (Memory(), result(memory)),
        "hosts": (Hosts(), result(*hosts)),
        "hosts of one kind": (Hosts(), result(hosts[0])),
    }


@pytest.mark.parametrize("name", results())
def test_reports_are_made_from_the_json_alone(name: str, tmp_path: Path) -> None:
    recipe, result = results()[name]
    text = markdown(result, recipe)
    assert "## Paper and this machine" in text
    assert_draws(recipe, result, tmp_path, 10_000)


def test_memory_overhead_is_in_percent() -> None:
    _, result = results()["memory"]
    extra = percent_more(result.points[0], "ooo_k3", "ddp", PEAK)
    assert extra.rounds == pytest.approx([1.5])


def test_hosts_and_rate_are_settings() -> None:
    found = settings_for("experiment=ooo_ksweep", "hardware=emulated", "hosts=4", "rate=500mbit")
    assert (found.hardware.name, found.hosts, found.rate) == ("emulated", 4, "500mbit")
    assert settings_for("experiment=ooo_ksweep").hardware.name == "emulated"


@pytest.mark.parametrize("override", ["hosts=four", "rate=[1]", "links=2", "emulate_compute=often", "ks=3"])
def test_wrong_settings_are_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        settings_for("experiment=ooo_ksweep", override)


def test_wrong_values_are_refused_before_anything_runs() -> None:
    def refused(message: str, **more: Any) -> None:
        with pytest.raises((ValueError, ClusterUnavailable), match=message):
            Sweep().compare_variants(settings(**more), print)

    refused("rate=2gbit needs links to shape: choose hardware=emulated", rate="2gbit")
    refused("hosts=0 is out of range", hosts=0)
    emulated = settings(hardware=Hardware("emulated", "cpu", None))
    with pytest.raises(ValueError, match="rate='fast' is no link rate"):
        Sweep().compare_variants(replace(emulated, rate="fast"), print)
    with pytest.raises(ValueError, match="not on hardware=cuda: choose hardware=emulated"):
        Sweep().compare_variants(settings(hardware=Hardware("cuda", "cuda", None)), print)
    with pytest.raises(ValueError, match="variant 'quick' is unknown"):
        Sweep().compare_variants(settings(variants=["quick"]), print)
    with pytest.raises(ValueError, match="ks is empty"):
        Sweep().points(settings())
    with pytest.raises(ValueError, match=r"cases.a.depth is no setting of a case"):
        of_case(settings(cases={"a": {"depth": 3}}), "a")
    with pytest.raises(ValueError, match="set emulate_compute=true"):
        Hosts().points(settings(host_counts=[1, 1000]))


def test_variants_are_timed_on_ranks_with_both_bounds() -> None:
    heard: list[str] = []
    variants = ["ddp", "ddp_layer_buckets", "ddp_tuned_buckets", "priority", "priority_4"]
    found = Sweep().compare_variants(settings(variants=variants), heard.append)
    names = {*variants, "compute", "communication"}
    assert {row.variant: len(row.values) for row in found.rows} == dict.fromkeys(names, 1)
    assert found.facts[IDENTICAL] == ", ".join(variants)
    assert found.facts["gradient bytes"] == 2 * LINEAR_BYTES
    assert found.facts["cluster"]["hosts"] == 2
    assert found.facts["cluster"]["gloo_bits"] > 0
    assert "links carry" in heard[0]
    assert names <= set(heard)


@pytest.mark.parametrize("credit", [1, 2, 3])
def test_the_most_urgent_partition_leaves_as_soon_as_another_has_arrived(monkeypatch, credit: int) -> None:
    sent: list[tuple[Tensor, Future]] = []
    left = threading.Semaphore(0)

    def all_reduce(part: Tensor, group: None, async_op: bool) -> SimpleNamespace:
        sent.append((part, Future()))
        left.release()
        return SimpleNamespace(get_future=lambda work=sent[-1][1]: work)

    monkeypatch.setattr(ooo_variants, "own_group", lambda: None)
    monkeypatch.setattr(ooo_variants, "close_group", lambda group: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda choice, root, group: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reducer = PriorityReducer(credit, partition_bytes=8)
    done = [reducer.start(0, torch.tensor([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]))]
    assert all(left.acquire(timeout=30) for _ in range(credit)), "what is there leaves, up to the credit"
    done += [reducer.start(number, torch.tensor([0.0, 0.0, 0.5]) + number) for number in (1, 2)]
    for number in range(8):
        assert not left.acquire(blocking=False), "no more than the credit is on its way"
        part, work = sent[number]
        part.add_(1)
        work.set_result([part])
        assert number >= 8 - credit or left.acquire(timeout=30)
    assert done[0].wait().tolist() == pytest.approx([1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3])
    assert [one.wait().tolist() for one in done[1:]] == [[2.0, 2.0, 2.5], [3.0, 3.0, 3.5]]
    order = [0.0, 0.1, 0.2, 0.3]
    order[credit:credit] = [2.0, 2.5, 1.0, 1.5]
    assert [part[0].item() - 1 for part, _ in sent] == pytest.approx(order, abs=1e-6)
    failed = reducer.start(0, torch.zeros(2))
    assert left.acquire(timeout=30)
    sent[-1][1].set_exception(RuntimeError("another rank is gone"))
    with pytest.raises(RuntimeError, match="another rank is gone"):
        failed.wait()
    reducer.close()
