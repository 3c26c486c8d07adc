"""The simulated out-of-order recipes: exact figures, what is counted, what is calibrated, and that they say so."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from retime.foundations.measure import spread
from retime.recipes import models
from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.ooo import claims as ooo_claims
from retime.recipes.ooo.calibration import Parameters, calibrate, read_runs, simulated_ms
from retime.recipes.ooo.model_costs import P100_SXM2, SETTINGS, V100, Gpu, calibrated, compute_ms, count, layer_costs
from retime.recipes.ooo.scaling import CALIBRATED, OVER, PAPERS_NETWORK, Discussion, Scaling
from retime.recipes.ooo.settings import SimulatedSettings
from retime.recipes.ooo.timelines import CONVENTIONAL, PRIORITISED, REVERSED
from retime.schedules import Cluster, LayerCost, Link
from retime.schedules.systems import BASELINE_OF, BYTEPS, HEADINGS, OURS, OURS_PRIORITY, PRIORITY, Sizes, run
from support.recipes import ran

RESNET_50 = {"_target_": "retime.recipes.models.resnet", "depth": 50}
SIZES = Sizes(4_096_000, 26_214_400)


def settings(**options):
    common = {
        "name": "x",
        "title": "title",
        "paper": "ooo-backprop",
        "where": "Figure",
        "recipe": "retime.recipes.ooo.scaling.Scaling",
        "hardware": Hardware("simulated", "cpu", None),
        "model": RESNET_50,
    }
    return SimulatedSettings(**{**common, **options})


# --- Figure 4


def test_figure_4_from_the_command_line(command_line, capsys):
    command_line("experiment=ooo_fig4")
    folder = Path("outputs", "ooo-backprop", "figure-4", "simulated")
    result = load(folder / "result.json")
    (point,) = result.points
    assert result.simulated
    assert [point.values(name, "step") for name in (CONVENTIONAL, PRIORITISED, REVERSED)] == [[29.0], [28.0], [25.0]]
    assert point.facts["units by k"] == {"0": 29, "1": 29, "2": 27, "3": 25, "4": 25}
    assert "Simulated, not measured" in (folder / "result.md").read_text()
    assert (folder / "result.png").stat().st_size > 10_000
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        f"({letter}) {lane}" for letter in "abc" for lane in ("GPU", "network")
    }
    assert "1.160 x" in capsys.readouterr().out


def test_only_29_28_and_25_units_give_the_papers_ratios():
    over_a, over_b = ooo_claims.claim("figure-4-over-a").value, ooo_claims.claim("figure-4-over-b").value
    found = [(a, a - 1, c) for a in range(2, 60) for c in range(1, a) if (a / c, (a - 1) / c) == (over_a, over_b)]
    assert found == [(29, 28, 25)]


# --- what a network costs


def test_layers_are_counted_by_hand():
    """Two layers of a small network; each takes what follows it along."""

    def build():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
        )

    operations = count(build, image_size=8)
    assert [o.macs for o in operations] == [8 * 8 * 4 * 27, 0, 0, 2560]
    assert [o.parameters for o in operations] == [108, 8, 0, 2570]
    slow_memory, slow_arithmetic = Gpu("a", 1e30, 1e9), Gpu("b", 1e9, 1e30, 0.5)
    first, last = layer_costs(operations, slow_arithmetic, 2)
    assert (first.size_bytes, last.size_bytes) == (4 * 116, 4 * 2570)
    assert last.forward_ms == last.output_gradient_ms == last.weight_gradient_ms == pytest.approx(2 * 2 * 2560 / 5e5)
    first, last = layer_costs(operations, slow_memory, 2)
    assert last.forward_ms == pytest.approx(4 * (2 * (256 + 10) + 2570) / 1e6)
    assert last.output_gradient_ms > last.forward_ms
    assert first.weight_gradient_ms == pytest.approx(4 * (2 * (192 + 256) + 108) / 1e6)


def test_resnet_50_on_a_v100_and_what_others_measured():
    operations = count(lambda: models.resnet(50))
    assert sum(o.parameters for o in operations) == 25_557_032
    assert sum(o.macs for o in operations) == pytest.approx(4.09e9, rel=1e-2)
    gpu = calibrated(V100, operations, 128, 380.0)
    costs = layer_costs(operations, gpu, 128)
    assert len(costs) == 54
    assert compute_ms(costs) == pytest.approx(380.0)
    deferred = ooo_claims.claim("discussion-deferred").value
    assert sum(c.weight_gradient_ms for c in costs[1:45]) == pytest.approx(deferred, rel=0.05)
    p100 = dataclasses.replace(P100_SXM2, efficiency=gpu.efficiency)
    images = 1e3 * 64 / compute_ms(layer_costs(operations, p100, 64))
    assert images == pytest.approx(ooo_claims.claim("p100-resnet-50").value, rel=0.10)


# --- systems and clusters

UNEVEN = [LayerCost(3, 3, 3, size) for size in (10_000, 50_000, 200_000, 800_000, 0, 3_200_000)]


@pytest.mark.parametrize("system", list(HEADINGS))
@pytest.mark.parametrize("bits_per_s", [1e8, 1e9, 1e12])
def test_searched_k_is_never_slower_than_its_baseline(system, bits_per_s):
    cluster = Cluster(4, 1, Link(bits_per_s, 0.01))
    sizes = Sizes(100_000, 1_000_000)
    k, timeline = run(system, UNEVEN, cluster, sizes)
    baseline = run(BASELINE_OF.get(system, system), UNEVEN, cluster, sizes)[1]
    assert timeline.step_ms <= baseline.step_ms + 1e-6
    assert timeline.step_ms >= max(timeline.compute_ms, timeline.busy_ms) - 1e-6
    assert (k == 0) or system in BASELINE_OF


def test_clusters_of_table_2():
    assert {name: (s.gpu.name, max(s.devices), s.bits_per_s) for name, s in SETTINGS.items()} == {
        "Priv-A": ("Titan XP", 8, 10e9),
        "Priv-B": ("P100", 20, 20e9),
        "Pub-A": ("V100", 48, 10e9),
    }
    cluster = SETTINGS["Pub-A"].cluster(48, 0.5, 0.05)
    assert (cluster.nodes, cluster.devices_per_node, cluster.between_nodes.bits_per_s) == (12, 4, 5e9)
    assert SETTINGS["Pub-A"].cluster(2, 1.0, 0.0).nodes == 1
    with pytest.raises(ValueError, match="devices=6 do not fill nodes of 4: give a multiple"):
        SETTINGS["Pub-A"].cluster(6, 1.0, 0.0)


# --- section 8.3


def test_discussion_of_section_8_3(tmp_path):
    recipe = Discussion()
    result = recipe.run(settings(recipe="retime.recipes.ooo.scaling.Discussion"), tmp_path, Console(quiet=True))
    lines = {line.against: line.measured.median for line in recipe.compare(result)}
    assert lines[ooo_claims.claim("compute")] == pytest.approx(380)
    assert lines[ooo_claims.claim("overhead")] == pytest.approx(350, abs=0.5)
    assert lines[ooo_claims.claim("discussion-deferred")] == pytest.approx(85, rel=0.05)
    assert 200 <= lines[ooo_claims.claim("discussion-remaining")] <= 250
    assert 1.15 <= lines[ooo_claims.claim("discussion-speedup")] <= 1.3
    parts = ("discussion-deferred", "discussion-further", "discussion-remaining")
    total = sum(lines[ooo_claims.claim(name)] for name in parts)
    assert total == pytest.approx(lines[ooo_claims.claim("overhead")])
    assert result.simulated
    recipe.draw(result, tmp_path / "x.png")


def test_overhead_that_no_network_gives_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"overhead_ms=1000000.*: this network and batch size can have"):
        Discussion().run(settings(overhead_ms=1_000_000.0), tmp_path, Console(quiet=True))


# --- calibration

TRUE = Parameters(share=0.7, latency_ms=0.5, interference=0.3)
LAYERS = [{"name": f"{i}", "forward_ms": 4.0, "output_ms": 4.0, "weight_ms": 5.0, "bytes": 4_000_000} for i in range(6)]


def made_up(folder, spoil=1.0):
    """A Figure 10 measured on ranks that behave as the simulator with the parameters TRUE says."""
    points = []
    for hosts in (1, 2, 4):
        cluster = {"hosts": hosts, "rate_bits": 2e9, "tcp_bits": 1.9e9, "bucket_bytes": 25 * 2**20}
        facts = {"cluster": {**cluster, "k": 3, "update_ms": 6.0}, "layers": LAYERS}
        alone = Row("compute", "step", "ms", [80.0])
        point = Point({"hosts": hosts, "compute": "real"}, {"layer_bucket_mb": 4.0}, [alone], facts)
        names = ["ddp", "ddp_layer_buckets", "ooo_k0", "ooo_tuned", "ooo_tuned_waiting"]
        rows = [Row(name, "step", "ms", [1.0]) for name in names]
        point = dataclasses.replace(point, rows=[alone, *rows])
        Result("x", "x", "x", "x", "x", [point]).save(folder)
        times = [simulated_ms(run, TRUE) for run in read_runs(folder / "result.json")]
        rows = [Row(name, "step", "ms", [spoil * ms] * 3) for name, ms in zip(names, times, strict=False)]
        points.append(dataclasses.replace(point, rows=[alone, *rows]))
    Result("x", "x", "x", "x", "x", points).save(folder)
    return folder / "result.json"


def test_runs_are_read_as_measured(tmp_path):
    runs = {run.name: run for run in read_runs(made_up(tmp_path))}
    assert len(runs) == 10, "one host sends nothing"
    tuned = runs["hosts=4 compute=real ooo_tuned"]
    assert (tuned.hosts, tuned.k, tuned.cross_iteration, tuned.bits_per_s) == (4, 3, True, 2e9)
    assert not runs["hosts=4 compute=real ooo_tuned_waiting"].cross_iteration
    assert not runs["hosts=2 compute=real ddp"].cross_iteration
    assert runs["hosts=2 compute=real ddp_layer_buckets"].bucket_bytes == 4 * 2**20
    assert sum(c.compute_ms for c in tuned.costs) - tuned.costs[0].output_gradient_ms == pytest.approx(80.0)


def test_calibration_needs_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"measure it with `python -m retime.recipes experiment=ooo_fig10"):
        read_runs(tmp_path / "result.json")
    runs = read_runs(made_up(tmp_path))
    with pytest.raises(ValueError, match=r"3 measured runs: .* take 4 or more"):
        calibrate(runs[:3])


def test_where_layers_sleep_the_network_takes_nothing_from_them(tmp_path):
    one = read_runs(made_up(tmp_path))[0]
    asleep = dataclasses.replace(one, contended=False)
    assert simulated_ms(asleep, TRUE) < simulated_ms(one, TRUE)
    assert simulated_ms(asleep, TRUE) == simulated_ms(asleep, dataclasses.replace(TRUE, interference=0.0))


# --- Figure 10


def test_figure_10_with_and_without_calibration(tmp_path, monkeypatch):
    small = dataclasses.replace(SETTINGS["Pub-A"], devices=(4, 16))
    monkeypatch.setitem(SETTINGS, "Pub-A", small)
    options = {"clusters": ["Pub-A"], "networks": [PAPERS_NETWORK, CALIBRATED], "models": {"ResNet-50": RESNET_50}}
    missing = settings(**options, calibration=str(tmp_path / "none.json"))
    assert [at["network"] for at in Scaling().points(missing)] == [PAPERS_NETWORK]

    recipe = Scaling()
    measured = made_up(tmp_path / "measured")
    result = ran(recipe, settings(**options, calibration=str(measured)), tmp_path)
    assert result.simulated
    paper, calibrated_point = result.points
    gain = paper.values(OURS, "16 GPUs")[0] / paper.values(BYTEPS, "16 GPUs")[0]
    assert 1.1 < gain < 1.4
    assert paper.values(OURS, "4 GPUs")[0] == pytest.approx(paper.values(BYTEPS, "4 GPUs")[0], rel=0.05)
    found = calibrated_point.facts["calibration"]
    assert (found["runs"], found["mean_error"] < 0.01, abs(found["worst_error"]) < 0.03) == (10, True, True)
    assert found["share"] == pytest.approx(TRUE.share, rel=0.1)
    assert found["interference"] == pytest.approx(TRUE.interference, abs=0.1)
    assert calibrated_point.facts["network Gbit/s"] == pytest.approx(7.0, rel=0.1)
    notes = " ".join(recipe.notes(result))
    assert "Calibrated on 10 measured runs" in notes
    console = Console(record=True, width=160)
    recipe.show(result, console)
    assert "16 x V100, ResNet-50" in console.export_text()
    in_order, priorities = (
        [line for line in recipe.compare(result) if f"{over}, network as in {PAPERS_NETWORK}" in line.note]
        for over in OVER.values()
    )
    assert in_order[0].measured == spread([gain])
    ratio = paper.values(OURS_PRIORITY, "16 GPUs")[0] / paper.values(PRIORITY, "16 GPUs")[0]
    assert priorities[0].measured == spread([ratio])
    assert ratio < gain  # a network that sends the most urgent gradient first needs no other order
    without = dataclasses.replace(result, points=[paper])
    assert "Not calibrated on measured runs" in " ".join(recipe.notes(without))


def test_unknown_cluster_is_refused():
    with pytest.raises(ValueError, match=r"clusters=\['Mine'\]: there are Priv-A, Priv-B, Pub-A"):
        Scaling().points(settings(clusters=["Mine"]))
