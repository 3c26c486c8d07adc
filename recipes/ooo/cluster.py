"""Out-of-order recipes on ranks: what all of them share, and the two that hold results and memory against DDP's.

A network, ranks on it, what they measured as rows and facts (:class:`OnRanks`). `ooo_convergence` has the losses of
training on real data, step by step, which must lie on each other bit by bit; `ooo_memory` what reordering adds to the
peak memory of training (section 8.3: less than 1 %).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, show
from retime.recipes.core.measure import MALLOC
from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, best_of, percent_more, titled
from retime.recipes.emulated import Network, emulated_network, loopback, parse_rate, rate_text, run_ranks
from retime.recipes.emulated.ranks import sent_bytes
from retime.recipes.ooo.claims import claim
from retime.recipes.ooo.settings import OutOfOrderSettings, of_case
from retime.recipes.ooo.variants import BOUNDS, COMMUNICATION, COMPUTE, label, variant
from retime.recipes.ooo.worker import BUCKET_BYTES, serve

BALANCED = "balanced"
IDLE = "processor idle"
IDENTICAL = "final weights bit-identical to ddp, on all ranks"
PEAK, FIRST_PEAK = "peak memory", "peak of the first steps"
MIB = 2**20
_BALANCING_BITS = 2e9
_LEAST_BITS, _MOST_BITS = 20e6, 20e9


class OnRanks(Recipe[OutOfOrderSettings]):
    """A recipe that measures inside `Trainer.fit` on ranks: of an emulated cluster, or of loopback (`hardware=cpu`)."""

    def references(self, point: Point) -> dict[str, str]:
        if self.quantity != "step":
            return {}
        references = {"speed over ddp": "ddp"}
        peer = best_of(point, "ddp", "step")
        return references if peer in (None, "ddp") else {**references, f"speed over {peer}": peer}

    def network(self, settings: OutOfOrderSettings, hosts: int, rate: str | None) -> AbstractContextManager[Network]:
        """The network that the settings ask for.

        Raises:
            ValueError: no hardware for ranks, or a rate on hardware without links.
        """
        if settings.hardware.name == "emulated":
            bits = None if rate is None else _BALANCING_BITS if rate == BALANCED else parse_rate(rate)
            return emulated_network(hosts, bits)
        if settings.hardware.name != "cpu":
            raise ValueError(
                f"{settings.name} runs its ranks on this machine's cores, not on hardware={settings.hardware.name}: "
                "choose hardware=emulated, or hardware=cpu for unshaped loopback"
            )
        if rate is not None:
            raise ValueError(
                f"rate={rate} needs links to shape: choose hardware=emulated (as root), or rate=null for loopback"
            )
        return nullcontext(loopback(hosts))

    def peaks(self, settings: OutOfOrderSettings, tick: Tick) -> Measured:
        """Peak memory of each variant's fit, from fresh processes: rows in MiB, the worst rank's."""
        peaks, facts = dict[tuple[str, str], list[float]](), dict[str, Any]()
        with self.network(settings, settings.hosts, settings.rate) as network:
            for _ in range(settings.rounds):
                for name in settings.variants:
                    answers = self.run_job(settings, network, tick, "memory", variants=[name])
                    for quantity, key in ((PEAK, "later_bytes"), (FIRST_PEAK, "first_bytes")):
                        peaks.setdefault((name, quantity), []).append(max(answer[key] for answer in answers) / MIB)
                    facts["gradient bytes"] = answers[0]["gradient_bytes"]
        return Measured([Row(name, quantity, "MiB", values) for (name, quantity), values in peaks.items()], facts)

    def run_job(
        self, settings: OutOfOrderSettings, network: Network, tick: Tick, job: str, **more: Any
    ) -> list[dict[str, Any]]:
        """Run one of the worker's jobs and return each rank's answer; `more` stands in place of settings."""
        request = {**asdict(settings), "do": job, **more}

        def progress(text: str) -> None:
            if text.startswith("links carry"):
                rate = "unshaped" if network.bits_per_second is None else f"{rate_text(network.bits_per_second)}/s"
                print(f"{settings.name}: {len(network.hosts)} hosts, {rate}: {text}")
            tick(text)

        malloc = MALLOC if job == "memory" else None
        return run_ranks(network, serve, request, timeout_s=settings.timeout_s, environment=malloc, progress=progress)

    def balance(self, settings: OutOfOrderSettings, network: Network, tick: Tick, **more: Any) -> dict[str, Any]:
        """Shape the network so that communication takes as long as computation; returns how that was found.

        Both are measured at a trial rate. What communication takes beyond its bytes at that rate is the processor's own
        work on them, which no rate changes, so the rate follows from the rest.
        """
        bounds = {"variants": [], "timelines": [], "rounds": 2, "warmup_rounds": 0}
        answer = self.run_job(settings, network, tick, "compare", **{**more, **bounds})[0]
        compute_ms, communication_ms = (min(answer["step_ms"].get(name, [0.0])) for name in (COMPUTE, COMMUNICATION))
        sent = 8 * sent_bytes(answer["gradient_bytes"], len(network.hosts))
        own_ms = max(0.0, communication_ms - sent / _BALANCING_BITS * 1e3)
        bits = sent / max(compute_ms - own_ms, 0.2 * compute_ms) * 1e3
        bits = float(min(max(bits, _LEAST_BITS), _MOST_BITS))
        network.shape(bits)
        return {"compute_ms": round(compute_ms, 2), "rate": rate_text(bits)}

    def compare_variants(self, settings: OutOfOrderSettings, tick: Tick, **more: Any) -> Measured:
        """Step times of the variants and the bounds at one place, with what a simulator needs to be calibrated."""
        for name in settings.variants:
            variant(name)
        with self.network(settings, settings.hosts, settings.rate) as network:
            balanced = self.balance(settings, network, tick, **more) if settings.rate == BALANCED else None
            answers = self.run_job(settings, network, tick, "compare", **more)
            bits = network.bits_per_second
        first = answers[0]
        rows = [Row(name, "step", "ms", values) for name, values in first["step_ms"].items()]
        rows += [Row(name, IDLE, "ms", values) for name, values in first["idle_ms"].items()]
        rows += [
            Row(name, phase, "ms", [milliseconds])
            for name, phases in first["phases_ms"].items()
            for phase, milliseconds in phases.items()
        ]
        facts: dict[str, Any] = {
            "parameters": first["parameters"],
            "gradient bytes": first["gradient_bytes"],
            IDENTICAL: ", ".join(identical(answers)) or "none",
            "cluster": {
                "hosts": settings.hosts,
                "rate_bits": bits,
                "batch_size": settings.batch_size,
                "k": first["k"],
                "bucket_bytes": BUCKET_BYTES,
                "communication_processor_ms": first["communication_processor_ms"],
                **first["bandwidth"],
            },
        }
        facts |= {what: fact for what, fact in (("search", first["search"]), ("balanced", balanced)) if fact}
        return Measured(rows, facts)


def identical(answers: list[dict[str, Any]]) -> list[str]:
    """The variants that ended every time, on every rank, with the weights and buffers of `ddp` on that rank.

    Ranks are not held against one another: each ends with the BatchNorm statistics of its own last batch.
    """
    ranks = [answer["weights"] for answer in answers]
    names = ranks[0] if all(len(weights.get("ddp", [])) == 1 for weights in ranks) else []
    return [name for name in names if all(weights[name] == weights["ddp"] for weights in ranks)]


def bound_ms(point: Point) -> list[float]:
    """In each round the longer of computation and communication: no schedule can step faster."""
    bounds = [point.values(name, "step") for name in BOUNDS if point.has(name, "step")]
    return [max(values) for values in zip(*bounds, strict=True)]


def bound_fraction(point: Point, name: str) -> Spread | None:
    """Share of the bound's speed that a variant reaches, in each round."""
    there = point.has(name, "step") and point.has(COMPUTE, "step")
    return speedup(bound_ms(point), point.values(name, "step")) if there else None


def busy_ceiling(point: Point) -> Spread | None:
    """Speed over `ddp` that a schedule could reach with the same work and no waits, in each round.

    None for one rank, and for layers that sleep: their cores are idle at work.
    """
    if not point.has("ddp", IDLE) or point.facts["cluster"]["hosts"] < 2 or point.at.get("compute") == "emulated":
        return None
    pairs = zip(point.values("ddp", "step"), point.values("ddp", IDLE), strict=True)
    return spread([step / (step - min(idle, 0.99 * step)) for step, idle in pairs])


def best_of_ours(point: Point) -> str | None:
    """The name of what a user gets: the tuned k, or else the fastest fixed k, with the cross-iteration wait."""
    names = [name for name in point.variants("step") if name.startswith("ooo_") and "_waiting" not in name]
    tuned = [name for name in names if name.startswith("ooo_tuned")]
    return point.fastest(tuned or names, "step")


def bound_notes(point: Point, place: str) -> list[str]:
    """Each variant's share of the bound, and what the links carried."""
    cluster = point.facts["cluster"]
    rate = f"{rate_text(cluster['rate_bits'])}/s links" if cluster["rate_bits"] else "unshaped links"
    carried = f" that carry {rate_text(cluster['gloo_bits'])}/s in an all-reduce" if cluster["gloo_bits"] else ""
    lines = [f"- {place}: {cluster['hosts']} hosts, {rate}{carried}"]
    for name in point.variants("step"):
        fraction = bound_fraction(point, name)
        if fraction and name not in BOUNDS:
            lines.append(f"- {place}: {label(name)} reaches {show(fraction, 'x')} of max(compute, communication)")
            if point.has(name, IDLE) and point.at.get("compute") != "emulated":
                lines[-1] += f"; it leaves its core idle {show(point.spread(name, IDLE), 'ms')} a step"
    if ceiling := busy_ceiling(point):
        lines.append(
            f"- {place}: the processor alone allows {show(ceiling, 'x')} of DDP's speed: that is DDP's step without "
            "its idle time, since every host has one core here, which also does its network's work"
        )
    return lines


class Convergence(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a network with its data; every variant trains it for the same epochs."""

    quantity = "loss"
    curves = (("loss", "steps"),)

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["case"])
        with self.network(case, case.hosts, case.rate) as network:
            answers = self.run_job(case, network, tick, "losses", batches=case.steps)
        variants, ranks = answers[0]["variants"], [answer["variants"] for answer in answers]
        rows = [Row(name, "loss", "nats", one["losses"]) for name, one in variants.items()]
        what = ("losses", "weights")
        same = [name for name in variants if all(one[name][key] == one["ddp"][key] for one in ranks for key in what)]
        facts = {
            "losses and final weights bit-identical to ddp, on all ranks": ", ".join(same) or "none",
            "final loss": {name: one["losses"][-1] for name, one in variants.items()},
            "k": {name: one["k"] for name, one in variants.items() if one["k"] is not None},
        }
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name in point.variants("loss"):
                if name != "ddp":
                    what = f"{point.at['case']}: most that the loss of {label(name)} differs"
                    target = Target(what, "nats", 0.0, at_most=True)
                    pairs = zip(point.values("ddp", "loss"), point.values(name, "loss"), strict=True)
                    lines.append(Comparison(target, spread([max(abs(plain - ours) for plain, ours in pairs)])))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            f"- {point.at['case']}: loss {point.values('ddp', 'loss')[0]:.3f} at the first step, "
            f"{point.values('ddp', 'loss')[-1]:.3f} after {len(point.values('ddp', 'loss'))} steps (rank 0)"
            for point in result.points
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.one_or_panels(titled(result), len(result.points))
        for axes, point in zip(panels, result.points, strict=True):
            for index, name in enumerate(point.variants("loss")):
                # the curves cover each other, so each is drawn thinner than the one before
                width = max(6 - 2 * index, 1)
                axes.plot(point.values(name, "loss"), color=charts.COLOURS[index], linewidth=width, label=label(name))
            axes.set_title(point.at["case"], fontsize=10)
            axes.set_xlabel("training step")
        panels[0].set_ylabel("loss (nats), rank 0")
        panels[0].legend(fontsize=8)
        charts.save(drawing, path)


class Memory(CaseRecipe[OutOfOrderSettings], OnRanks):
    """Each case is a network; each variant's peak comes from fresh processes."""

    quantity = PEAK

    def measure(self, settings: OutOfOrderSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return self.peaks(of_case(settings, at["case"]), tick)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name in point.variants(PEAK):
                if name.startswith("ooo_"):
                    remark = f"{point.at['case']}, {label(name)}; above an idle process with a group"
                    lines.append(Comparison(claim("memory"), percent_more(point, name, "ddp", PEAK), remark))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            f"- {point.at['case']}: the gradients have {point.facts['gradient bytes'] / MIB:.1f} MiB; "
            f"plain DDP's peak is {point.median('ddp', PEAK):.1f} MiB"
            for point in result.points
            if point.has("ddp", PEAK)
        ] + [
            f"- {point.at['case']}: in the first steps, in which DDP builds its buckets anew, {label(name)} peaks at "
            f"{point.median(name, FIRST_PEAK):.1f} MiB"
            for point in result.points
            for name in point.variants(FIRST_PEAK)
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result))
        points = [point for point in result.points if point.has("ddp", PEAK)]
        names = [name for name in result.points[0].variants(PEAK) if name != "ddp"]
        series = [(label(name), [percent_more(point, name, "ddp", PEAK) for point in points]) for name in names]
        charts.beside(axes, series, 0.8 / max(1, len(names)))
        peaks = [f"{point.at['case']}\nDDP: {point.median('ddp', PEAK):.0f} MiB" for point in points]
        axes.set_xticks(range(len(points)), peaks)
        axes.axhline(0, color=charts.GREY, linewidth=1, linestyle="--", label="DDP")
        paper = {"linestyle": ":", "label": "the paper's: less than this"}
        axes.axhline(claim("memory").value, color=charts.GREY, linewidth=1, **paper)
        axes.set_ylabel("peak memory of a fit over DDP's, one rank (%)")
        charts.legend_beside(axes)
        charts.save(drawing, path)
