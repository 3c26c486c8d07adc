"""One network trained side by side without a budget and inside several, and what each process held, moved and learnt.

Processor memory is the device and a disk the host. Every budget has a process of its own in which the kernel refuses
data bytes beyond it (RLIMIT_DATA); all processes of a network take turns, a block of steps each. What
:func:`side_by_side` measured is read below: ratios, report lines and notes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing as closed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retime.foundations.measure import Spread, spread
from retime.foundations.workers import Worker, WorkerError, answer_once, closing
from retime.recipes.core.build import saved_batch
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import Tick
from retime.recipes.core.results import Point, Row
from retime.recipes.cpu_memory.allocators import ALLOCATORS, environments_of
from retime.recipes.modnn.budget_worker import PARTS, PEERS, Server, part_sizes
from retime.recipes.modnn.settings import MemorySettings, target

MIB = 2**20
UNLIMITED, GIVING_BACK, FLOOR = "unlimited", "unlimited, freed memory given back", "floor"
POOLED = "unlimited, with the pool"
"""The plain step, with tensors from the pool that steps inside budgets use."""
IN_SUB_BATCHES = "unlimited, in sub-batches of {}"
"""That step in parts: those of a plan without its budget, so that what is left is what the budget takes, or by hand."""
BY_HAND = "unlimited, by hand: {}"
"""That step with what users do in its place for memory, by `budget_worker.PEERS`."""
OTHER_ALLOCATOR = "unlimited, {}"
"""The plain step in a process that was started with another allocator, by that one's label."""
STEP, PREDICTED, MEASURED, MOVED = "step", "predicted peak", "measured peak", "moved a step"
DIFFERENCE, BUDGET = "weights differ", "budget"
VDNN_PLUS = "vDNN+ ({}), {}"
"""By its rule and the budget's name."""
FAILURES = ("refused", "out of memory", "failed")
"""What becomes of a process that does not train; facts of these names say why, a variant each."""
_PLAN_KEYS = ("plan", "sub_batch", "offloaded", "predicted_slowdown", "replanned")
_NO_MEMORY = (
    *("MemoryError", "can't allocate memory", "bad_alloc", "could not create a primitive", "the process ended"),
    "CUDA out of memory",
)

Block = Callable[[Worker, int, str, dict[str, Any]], float]


class Network:
    """A network, its optimizer and its batch, as all processes of a comparison get them: each is told `request`.

    A case has model, batch_size, and what differs from the settings: data, optimizer, sub_batches. The folder is for
    the batch and for weights.
    """

    def __init__(self, settings: MemorySettings, case: dict[str, Any], folder: Path) -> None:
        self.settings, self.folder = settings, folder
        case = {"data": settings.data, "optimizer": settings.optimizer, **case}
        self.batch_size = case["batch_size"]
        host: str | None = settings.host
        if host == "disk:":  # CUDA devices have the processor's memory
            host = None if settings.hardware.device != "cpu" else f"disk:{tempfile.gettempdir()}"
        self.request = {
            **{key: case[key] for key in ("model", "optimizer")},
            "sub_batches": case.get("sub_batches", True),
            "batch": saved_batch(case, folder),
            "device": settings.hardware.device,
            "seed": settings.seed,
            "host": host,
            "headroom_bytes": int(settings.headroom_mb * MIB),
            "limit": settings.limit,
        }

    def plan(self) -> dict[str, Any]:
        """Needs of a step: `ideal_bytes`, `plain_peak_bytes`, `plain_reserved_bytes`, `floor_bytes`; `parameters`;
        whether its batch `stays_whole`, for batch statistics.

        The plain step's peak is predicted; the ideal is the budget it needs, with what stays free beside it;
        reserved are its tensors, with freed memory that is cached.
        """
        return dict(answer_once(Server, {**self.request, "do": "plan"}, self.settings.timeout_s))

    def process(self, budget: int | str | None, *, give_back: bool = True, **more: Any) -> Worker:
        """A process that trains inside a budget in bytes, at the floor or without; WorkerError, see `failure`."""
        limit = self.request["limit"] if isinstance(budget, int) else "training"
        train = {"do": "train", "budget_bytes": budget, "give_back": give_back, "limit": limit}
        environment = more.pop("environment", None)
        return Worker(Server, {**self.request, **train, **more}, self.settings.timeout_s, environment=environment)

    def trained(self, budget: int | str | None, **more: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        """Train a block in a process of its own: milliseconds, its answers before and at the end; or WorkerError."""
        with closed(self.process(budget, **more)) as worker:
            step_ms = worker.ask({"do": "block", "steps": self.settings.steps})["ms"]
            return step_ms, worker.ready, worker.ask({"do": "end", "weights": str(self.folder / "weights.pt")})


@contextmanager
def network_for(settings: MemorySettings, case: dict[str, Any]) -> Iterator[Network]:
    """The network with a folder of its own; ValueError if `limit` is neither training nor planning."""
    if settings.limit not in ("training", "planning"):
        raise ValueError(f"limit={settings.limit!r}: choose training (from the first step on) or planning (before it)")
    with tempfile.TemporaryDirectory(prefix="retime-modnn-") as folder:
        yield Network(settings, case, Path(folder))


def failure(error: WorkerError) -> str:
    """Fate of a process that did not train: one of `FAILURES`, of which the last is for other reasons."""
    text = str(error)
    if text.startswith("BudgetError"):
        return "refused"
    return "out of memory" if any(sign in text for sign in _NO_MEMORY) else "failed"


def block_ms(worker: Worker, steps: int, name: str, facts: dict[str, Any]) -> float:
    """The median step of a block; 0 from the block on in which the process failed, and `facts` say how."""
    if name in facts["out of memory"] or name in facts["failed"]:
        return 0.0
    try:
        return spread(worker.ask({"do": "block", "steps": steps})["ms"]).median
    except WorkerError as error:
        facts[failure(error)][name] = str(error)
        return 0.0


def side_by_side(
    settings: MemorySettings, case: dict[str, Any], budgets: list[Any], tick: Tick, block: Block = block_ms
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and facts of a network without a budget and inside each budget: percents of the ideal peak, or the floor.

    For each rule of `settings.rules` vDNN+ trains inside the budgets in percent too, and each of `settings.peers`
    without a budget; a case may have rules and peers of its own. `block` has a worker train some steps, and returns
    milliseconds a step; see `block_ms`, which is the default. ValueError names an unknown peer.
    """
    rules, peers = case.get("rules", settings.rules), case.get("peers", settings.peers)
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise ValueError(f"peers has {unknown[0]!r}: choose {', '.join(PEERS)}")
    with network_for(settings, case) as network:
        plan = network.plan()
        ideal, floor = plan["ideal_bytes"], plan["floor_bytes"]
        facts: dict[str, Any] = {
            "batch size": network.batch_size,
            "parameters": plan["parameters"],
            "ideal peak MiB": round(ideal / MIB, 2),
            "floor MiB": round(floor / MIB, 2),
            "ideal over floor": round(ideal / floor, 2),
            "peak of the plain step MiB": round(plan["plain_peak_bytes"] / MIB, 2),
            **{kind: {} for kind in FAILURES},
            "plans": {},
            "rules": {},
        }
        missing = facts["allocators that are not there"] = dict[str, str]()
        allocators = settings.allocators if settings.hardware.device == "cpu" else []
        others: list[tuple[str, None, dict[str, Any]]] = [
            (OTHER_ALLOCATOR.format(ALLOCATORS[name].label), None, {"environment": environment})
            for name, environment in environments_of(allocators, settings.libraries, missing).items()
        ]
        rows: list[Row] = []
        workers: dict[str, Worker] = {}
        with closing(workers):
            for name, budget, more in [*_named(budgets, plan, settings, rules, peers), *others]:
                try:
                    give_back = name != UNLIMITED and "environment" not in more
                    workers[name] = network.process(budget, give_back=give_back, **more)
                except WorkerError as error:
                    facts[failure(error)][name] = str(error)
                    continue
                if budget is not None:
                    rows.append(Row(name, BUDGET, "MiB", [workers[name].ready["budget_bytes"] / MIB]))
            cut = [worker.ready["sub_batch"] for worker in workers.values()] if settings.in_sub_batches else []
            sizes = {*cut} - {None, network.batch_size}
            if PARTS in peers and not plan["stays_whole"]:
                sizes |= part_sizes(network.batch_size)
            for size in sorted(sizes):
                pooled = plan["plain_reserved_bytes"]
                workers[IN_SUB_BATCHES.format(size)] = network.process(None, reserved_bytes=pooled, sub_batch=size)
            blocks = {name: partial(block, worker, settings.steps, name, facts) for name, worker in workers.items()}
            for name, kept in interleave(blocks, settings.rounds, settings.warmup_rounds, tick).items():
                if all(kept):  # it lived through all of them
                    rows += [Row(name, STEP, "ms", kept), *_end(workers[name], name, network.folder, facts)]
    return rows, facts


def budget_name(budget: Any) -> str:
    """Name for the rows of a budget: percents of the ideal peak, or the floor."""
    return FLOOR if budget == FLOOR else f"{budget:g} %"


def _named(
    budgets: list[Any], plan: dict[str, Any], settings: MemorySettings, rules: list[str], peers: list[str]
) -> list[tuple[str, int | str | None, dict[str, Any]]]:
    """Processes by name: the budget of each, and what else its request has."""
    nbytes = {budget: FLOOR if budget == FLOOR else int(budget / 100 * plan["ideal_bytes"]) for budget in budgets}
    pooled = {"reserved_bytes": plan["plain_reserved_bytes"]}
    return [
        (UNLIMITED, None, {}),
        # The plain step once more, and its samples in another order: what rounding alone does to weights.
        (GIVING_BACK, None, {"reversed": True}),
        *([(POOLED, None, pooled)] if settings.hardware.device == "cpu" else []),  # CUDA devices have one anyway
        *((BY_HAND.format(peer), None, {**pooled, "peer": peer}) for peer in peers if peer != PARTS),
        *((budget_name(budget), nbytes[budget], {}) for budget in budgets),
        *(
            (VDNN_PLUS.format(rule, budget_name(budget)), nbytes[budget], {"rule": rule, "limit": "training"})
            for rule in rules
            for budget in budgets
            if budget != FLOOR
        ),
    ]


def _end(worker: Worker, name: str, folder: Path, facts: dict[str, Any]) -> list[Row]:
    """Rows on what a process held and moved, and on how far its weights are from those of the unlimited process."""
    place = folder / f"{name}.pt"
    answer = worker.ask({"do": "end", "weights": str(place)})
    rows = [Row(name, MEASURED, "MiB", [answer["measured_bytes"] / MIB])]
    facts["measured by"] = answer["source"]
    if name != UNLIMITED:
        rows.append(Row(name, DIFFERENCE, "ppm", [away_ppm(place, folder / f"{UNLIMITED}.pt")]))
    if name in (GIVING_BACK, POOLED):
        rows.append(Row(name, PREDICTED, "MiB", [facts["peak of the plain step MiB"]]))
    if "rule" in answer:
        facts["rules"][name] = answer["rule"]
    if "plan" in answer:
        planning_s = round(worker.ready["planning_s"], 2)
        facts["plans"][name] = {**{key: answer[key] for key in _PLAN_KEYS}, "planning_s": planning_s}
    for quantity, key in ((PREDICTED, "predicted_bytes"), (MOVED, "moved_bytes")):
        if key in answer:
            rows.append(Row(name, quantity, "MiB", [answer[key] / MIB]))
    return rows


def away_ppm(place: Path, reference: Path) -> float:
    """Distance of the weights of one file from those of another: norm of the difference over the other's norm."""
    ours, theirs = (torch.cat([each.flatten() for each in torch.load(weights)]) for weights in (place, reference))
    return 1e6 * float((ours - theirs).norm() / theirs.norm())


MEMORY = (
    "Memory is the process's peak resident size above the same process before it built the model, while it trains. "
    "Under RLIMIT_DATA the kernel refuses every data byte beyond the budget and headroom_mb, from the first step on. "
    "Each process has planned and trained without a limit before, and with a plan once more under the same plan, which "
    "it then follows: code that oneDNN generates and what Python keeps do not count. On a CUDA device memory is what "
    "its allocator gave out, and nothing but the plan keeps a budget; after each turn the process gives back what it "
    "freed, and a step that does not count takes it again. The ideal peak is predicted: tensors, what operations need "
    "for themselves, and what is to stay free beside."
)
REVERSED = (
    f"'{GIVING_BACK}' trains on its samples in reverse order: how far its weights are from the unlimited ones is what "
    "rounding alone does to the plain step ('plain, reversed')."
)
POOL = (
    "'unlimited' is plain torch with the C library's own way to keep freed memory, which clears large blocks anew each "
    "time and keeps small ones scattered. Budgets take tensors from a pool that uses freed memory again up to the "
    f"plan's peak, so a step in less memory can be the faster one. '{POOLED}' is the plain step with that pool; others "
    "are in processes started with another allocator. Slowdowns are over the fastest of all of these."
)


def budgets_of(point: Point) -> list[str]:
    """The budgets within which it trained."""
    rules = point.facts.get("rules", {})
    return [name for name in point.variants(STEP) if not name.startswith(UNLIMITED) and name not in rules]


def untrained(point: Point, budgets: Iterable[Any]) -> list[str]:
    """Budgets within which it did not train, each with the reason in a word."""
    names = [budget_name(budget) for budget in budgets]
    return [f"{point.at['network']} at {name}{why_missing(point, name)}" for name in names if not point.has(name, STEP)]


def fastest_plain(point: Point) -> str | None:
    """The step without a budget with whatever allocator serves it best, the pool of our own included."""
    others = (GIVING_BACK, IN_SUB_BATCHES.format(""), BY_HAND.format(""))
    plain = [name for name in point.variants(STEP) if name.startswith(UNLIMITED) and not name.startswith(others)]
    return point.fastest(plain, STEP)


def best_peer(point: Point, name: str) -> str | None:
    """The fastest plain step, one done by hand or vDNN+'s, among those that held no more bytes than this budget.

    Not with another allocator: it keeps what the rehearsal took, so that what the step holds cannot be told.
    """
    ours, others = (UNLIMITED, POOLED), (IN_SUB_BATCHES.format(""), BY_HAND.format(""))
    peers = [
        peer
        for peer in point.variants(STEP)
        if (peer in ours or peer.startswith(others) or peer in point.facts.get("rules", {}))
        and point.values(peer, MEASURED)[0] <= point.values(name, BUDGET)[0]
    ]
    return point.fastest(peers, STEP)


def over_best_peers(point: Point) -> Iterator[Comparison]:
    """A line a budget; none where no peer was asked for."""
    if not any(name.startswith(BY_HAND.format("")) for name in point.variants(STEP)):
        return
    for name in budgets_of(point):
        where, peer = f"{point.at['network']}, {name}", best_peer(point, name)
        if peer is None:
            yield Comparison(target("over-best-peer"), None, f"{where}: no peer fits")
        else:
            peak, budget = (
                amount(point.values(who, what)[0], "MiB") for who, what in ((peer, MEASURED), (name, BUDGET))
            )
            faster = point.speedup(peer, name, STEP)
            yield Comparison(target("over-best-peer"), faster, f"{where}: over {peer}, {peak} of {budget}")


def slowdown(point: Point, name: str) -> Spread | None:
    """Step time over that of the fastest step without a budget, in each round."""
    plain = fastest_plain(point)
    if plain is None or not point.has(name, STEP):
        return None
    return point.speedup(name, plain, STEP)


def prediction_error(point: Point, name: str) -> float:
    """The measured peak away from the predicted one, in percent."""
    return 100 * (point.values(name, MEASURED)[0] / point.values(name, PREDICTED)[0] - 1)


def needed_mib(point: Point, name: str) -> float:
    """The budget, or what the run turned out to hold if that is more."""
    return max(point.values(name, BUDGET)[0], point.values(name, MEASURED)[0])


def why_missing(point: Point, name: str) -> str:
    """In a word, why there are no times of a budget."""
    for kind in FAILURES:
        if name in point.facts[kind]:
            return f": {kind}"
    return ": not asked for"


def slowdowns(points: Sequence[Point]) -> Iterator[Comparison]:
    """A line a network for each of the two budgets with a wanted slowdown."""
    for name, wanted in (("50 %", target("slowdown-50")), ("25 %", target("slowdown-25"))):
        for point in points:
            slower, plain, text = slowdown(point, name), fastest_plain(point), point.at["network"]
            if slower is None:
                yield Comparison(wanted, None, f"{text}{why_missing(point, name)}")
                continue
            text += f", over {plain}"
            if plain != UNLIMITED and point.has(UNLIMITED, STEP):
                text += f"; {amount(point.speedup(name, UNLIMITED, STEP).median, 'x')} over {UNLIMITED}"
            cut = IN_SUB_BATCHES.format(point.facts["plans"][name]["sub_batch"])
            if bound := slowdown(point, cut):
                text += f"; {cut}: {amount(bound.median, 'x')}"
            yield Comparison(wanted, slower, text)


def differences(points: Sequence[Point], missing: Sequence[str]) -> Iterator[Comparison]:
    """The largest difference of weights among runs that only offload, and among those in sub-batches.

    Runs that are `missing` among them are named in both, as nobody knows which of the two they would be.
    """
    orders = {
        point.at["network"]: point.values(GIVING_BACK, DIFFERENCE)[0]
        for point in points
        if point.has(GIVING_BACK, DIFFERENCE)
    }
    for wanted, split in ((target("offload-difference"), False), (target("split-difference"), True)):
        ppm = {
            f"{point.at['network']} at {name}": point.values(name, DIFFERENCE)[0]
            for point in points
            for name in point.facts["plans"]
            if (point.facts["plans"][name]["sub_batch"] < point.facts["batch size"]) is split
        }
        if ppm or missing:
            listed = [f"{run} {amount(value, 'ppm')}" for run, value in ppm.items()]
            if split:
                listed += [f"{network}: plain, reversed {amount(value, 'ppm')}" for network, value in orders.items()]
            yield Comparison(wanted, spread([max(ppm.values())]) if ppm else None, with_missing(listed, missing))


def with_missing(listed: Iterable[str], missing: Sequence[str]) -> str:
    """A remark that lists runs, and then those that are not there."""
    return "; ".join([*listed, *([f"not trained: {', '.join(missing)}"] if missing else [])])


def plans_and_failures(point: Point, where: str) -> list[str]:
    """A note for each plan, and for each run that did not train."""
    lines = []
    for name, plan in point.facts.get("plans", {}).items():
        text = plan
        if isinstance(plan, dict):
            text = (
                f"{plan['plan']}; predicted {plan['predicted_slowdown']:.2f} x the unlimited time; peak "
                f"{amount(prediction_error(point, name), '%')} from the predicted one; planned in "
                f"{plan['planning_s']:.1f} s"
            )
        lines.append(f"- {where}, {name}: {text}")
    lines += [f"- {where}, {name}: {plan}" for name, plan in point.facts.get("rules", {}).items()]
    for kind in FAILURES:
        lines += [f"- {where}, {name}: {kind}: {why}" for name, why in point.facts.get(kind, {}).items()]
    return lines
