"""Reading what :func:`~retime.recipes.modnn.side_by_side.side_by_side` measured: ratios, report lines and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.results import Point
from retime.recipes.modnn import claims
from retime.recipes.modnn.side_by_side import (
    BUDGET,
    BY_HAND,
    DIFFERENCE,
    FAILURES,
    GIVING_BACK,
    IN_SUB_BATCHES,
    MEASURED,
    POOLED,
    PREDICTED,
    STEP,
    UNLIMITED,
    budget_name,
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
    """Those of the budgets within which it did not train, each with the reason in a word."""
    names = [budget_name(budget) for budget in budgets]
    return [f"{point.at['network']} at {name}{why_missing(point, name)}" for name in names if not point.has(name, STEP)]


def fastest_plain(point: Point) -> str | None:
    """The step without a budget with whatever allocator serves it best, the pool of our own included."""
    others = (GIVING_BACK, IN_SUB_BATCHES.format(""), BY_HAND.format(""))
    plain = [name for name in point.variants(STEP) if name.startswith(UNLIMITED) and not name.startswith(others)]
    return min(plain, key=lambda name: spread(point.values(name, STEP)).median, default=None)


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
    return min(peers, key=lambda peer: spread(point.values(peer, STEP)).median, default=None)


def over_best_peers(point: Point) -> Iterator[Comparison]:
    """A line a budget; none where no peer was asked for."""
    if not any(name.startswith(BY_HAND.format("")) for name in point.variants(STEP)):
        return
    for name in budgets_of(point):
        where, peer = f"{point.at['network']}, {name}", best_peer(point, name)
        if peer is None:
            yield Comparison(claims.target("over-best-peer"), None, f"{where}: no peer fits")
        else:
            held, budget = (
                amount(point.values(who, what)[0], "MiB") for who, what in ((peer, MEASURED), (name, BUDGET))
            )
            faster = speedup(point.values(peer, STEP), point.values(name, STEP))
            yield Comparison(claims.target("over-best-peer"), faster, f"{where}: over {peer}, {held} of {budget}")


def slowdown(point: Point, name: str) -> Spread | None:
    """Step time over that of the fastest step without a budget, in each round."""
    plain = fastest_plain(point)
    if plain is None or not point.has(name, STEP):
        return None
    return speedup(point.values(name, STEP), point.values(plain, STEP))


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


def slowdowns(points: Iterable[Point]) -> Iterator[Comparison]:
    """A line a network for each of the two budgets with a wanted slowdown."""
    known = list(points)
    for name, wanted in (("50 %", claims.target("slowdown-50")), ("25 %", claims.target("slowdown-25"))):
        for point in known:
            slower = slowdown(point, name)
            yield Comparison(wanted, slower, f"{point.at['network']}{_over(point, name) or why_missing(point, name)}")


def _over(point: Point, name: str) -> str:
    """Which step without a budget was the fastest, and the ratio over the C library's own way; empty if unknown."""
    plain = fastest_plain(point)
    if plain is None or not point.has(name, STEP):
        return ""
    text = f", over {plain}"
    if plain != UNLIMITED and point.has(UNLIMITED, STEP):
        usual = spread([a / b for a, b in zip(point.values(name, STEP), point.values(UNLIMITED, STEP), strict=True)])
        text += f"; {amount(usual.median, 'x')} over {UNLIMITED}"
    cut = IN_SUB_BATCHES.format(point.facts["plans"][name]["sub_batch"])
    bound = slowdown(point, cut)
    return text if bound is None else f"{text}; {cut}: {amount(bound.median, 'x')}"


def differences(points: Iterable[Point], missing: Iterable[str]) -> Iterator[Comparison]:
    """The largest difference of weights among runs that only offload, and among those in sub-batches.

    Args:
        points: of one line.
        missing: runs that should be among them and are not; named, as nobody knows which of the two they would be.
    """
    known, lacking = list(points), list(missing)
    orders = {
        point.at["network"]: point.values(GIVING_BACK, DIFFERENCE)[0]
        for point in known
        if point.has(GIVING_BACK, DIFFERENCE)
    }
    for wanted, split in ((claims.target("offload-difference"), False), (claims.target("split-difference"), True)):
        found = {
            f"{point.at['network']} at {name}": point.values(name, DIFFERENCE)[0]
            for point in known
            for name in point.facts["plans"]
            if (point.facts["plans"][name]["sub_batch"] < point.facts["batch size"]) is split
        }
        if found or lacking:
            listed = [f"{run} {amount(value, 'ppm')}" for run, value in found.items()]
            if split:
                listed += [f"{network}: plain, reversed {amount(value, 'ppm')}" for network, value in orders.items()]
            yield Comparison(wanted, spread([max(found.values())]) if found else None, with_missing(listed, lacking))


def with_missing(listed: Iterable[str], missing: Iterable[str]) -> str:
    """A remark that lists runs, and then those that are not there."""
    lacking = list(missing)
    return "; ".join([*listed, *([f"not trained: {', '.join(lacking)}"] if lacking else [])])


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
