"""Many seeds under one mechanism, and what to print of those that fail."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from contract.random_models.check import Verdict, check, check_spec
from contract.random_models.generator import generate
from contract.random_models.mechanisms import Mechanism
from contract.random_models.minimiser import minimise
from contract.random_models.spec import Spec
from support.garbage import pass_over_what_is_there

MINIMISED = 2
"""So many failures of a run are made small; the rest are listed."""


@dataclass
class Outcome:
    """Counts over seeds, and the failures."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[int, Verdict] = field(default_factory=dict)

    def add(self, seed: int, verdict: Verdict) -> None:
        self.counts[verdict.kind] += 1
        self.counts["on"] += verdict.on and verdict.kind == "same"
        self.counts["off"] += not verdict.on and verdict.kind == "same"
        if verdict.kind in ("refused", "void"):
            self.refusals[f"{verdict.kind}: {verdict.text[:150]}"] += 1
        if verdict.kind == "same" and verdict.text:
            self.refusals[f"off: {verdict.text[:400]}"] += 1
        if verdict.kind == "failed":
            self.failures[seed] = verdict

    @property
    def total(self) -> int:
        """All seeds."""
        return sum(self.counts[name] for name in ("same", "refused", "void", "failed"))

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[name]} {name}" for name in ("on", "off", "refused", "void", "failed"))


def run(mechanism: Mechanism, seeds: Iterable[int]) -> Outcome:
    """Check all of these."""
    outcome = Outcome()
    for seed in seeds:
        pass_over_what_is_there()
        outcome.add(seed, check(mechanism, seed))
    return outcome


def describe(mechanism: Mechanism, seed: int, verdict: Verdict, judge: Callable[[Spec], Verdict] | None = None) -> str:
    """A failing seed as the smallest model that fails, and how; `judge` is `check_spec` as default."""
    whole = mechanism.fit(generate(seed))
    wanted = _nature(verdict)
    judge = judge or partial(check_spec, mechanism)

    def fails(spec: Spec) -> bool:
        again = judge(mechanism.fit(spec))
        return again.kind == "failed" and _nature(again) == wanted

    small = mechanism.fit(minimise(whole, fails))
    text = judge(small).text or verdict.text
    return f"{mechanism.name}, seed {seed}:\n{small}\n{text}"


def _nature(verdict: Verdict) -> str:
    """Another way to fail is another failure: an error by its text's beginning, or a difference."""
    last = verdict.text.rpartition("\n")[2]
    return last[:40] if "difference" not in last else "difference"


def report(mechanism: Mechanism, outcome: Outcome) -> str:
    """All that failed, the first few made small."""
    lines = [f"{len(outcome.failures)} seeds fail under {mechanism.name}: {sorted(outcome.failures)}"]
    for seed, verdict in list(outcome.failures.items())[:MINIMISED]:
        lines.append(describe(mechanism, seed, verdict) if mechanism.here else verdict.text)
    return "\n\n".join(lines)
