"""Each verdict follows from values by its rule, and from nothing else."""

from math import inf

import pytest

from retime.commands.advise_turns import judged
from retime.foundations.measure import Spread, spread
from retime.recipes.core.claims import Check, Claim, Comparison, Paper, Published, Reading, Target
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.verdicts import Value, Verdict, accepted, along, counted, inside, judge, kind_of, values_of

PAPER = Paper("a-paper", "A", "Somebody 2020", "A title", {"measured": ["recipes"]})


def claim(check: Check, **other: object) -> Published:
    options = {"unit": "x", "value": 1.2, "result": "a-paper/figure-1/cpu", **other}
    return Published(1, "a-claim", "Figure 1", "speed", check=check, **options)  # type: ignore[arg-type]


def result(*rounds: float, simulated: bool = False, hardware: str = "cpu") -> Result:
    rows = [Row("slow", "step", "ms", [10.0] * len(rounds)), Row("fast", "step", "ms", [10 / r for r in rounds])]
    point = Point({}, {"hardware": {"name": hardware}}, rows)
    return Result("an_experiment", "a.Recipe", "a-paper", "Figure 1", "A title", [point], simulated=simulated)


def verdict(published: Published, of: Result | None, *comparisons: Comparison) -> Verdict:
    return judge(PAPER, published, of, comparisons).verdict


RATIO = Reading(ratio=["slow", "fast"])
WITHIN = claim(Check(within=0.25), read=RATIO)  # 1.15 to 1.25


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ((1.16, 1.2, 1.24), Verdict.HOLDS),
        ((1.15,), Verdict.HOLDS),  # the bound itself is within
        ((1.1, 1.2, 1.2, 1.2, 1.2), Verdict.HOLDS),  # a tail alone does not straddle
        ((1.0, 1.1, 1.12), Verdict.FAILS),
        ((1.3, 1.4), Verdict.FAILS),  # more than the paper's is not the paper's either
        ((1.1, 1.1, 1.2, 1.2), Verdict.UNDECIDED),
        ((1.0, 1.0, 1.4, 1.4), Verdict.UNDECIDED),
    ],
)
def test_quartiles_decide(rounds: tuple[float, ...], said: Verdict) -> None:
    assert verdict(WITHIN, result(*rounds)) is said


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (result(1.2, simulated=True), "simulated"),
        (result(1.2, hardware="emulated"), "emulated"),
        (result(1.2), "measured"),
    ],
)
def test_it_holds_in_simulation_if_nothing_was_measured(made: Result, kind: str) -> None:
    assert kind_of(made) == kind
    assert verdict(WITHIN, made) is (Verdict.HOLDS if kind == "measured" else Verdict.IN_SIMULATION)
    sleeping = claim(Check(within=0.25), read=RATIO, kind="emulated")
    assert verdict(sleeping, result(1.2)) is Verdict.IN_SIMULATION
    assert verdict(claim(Check(within=0.25), read=RATIO, kind="counted"), made) is Verdict.HOLDS
    assert verdict(WITHIN, result(1.5, simulated=True)) is Verdict.FAILS


def test_what_stands_in_for_a_claim_never_confirms_it() -> None:
    loop = claim(Check(within=0.25), read=RATIO, instead="A loop ran, not a scan.")
    judged = judge(PAPER, loop, result(1.2), [])
    assert (judged.verdict, judged.why) == (Verdict.UNDECIDED, "A loop ran, not a scan.")
    assert verdict(loop, result(1.0)) is Verdict.FAILS


def test_rows_beside_a_claim_are_not_counted() -> None:
    claims = [claim(Check(at_least=1), read=RATIO, beside=beside) for beside in (False, True)]
    both = [judge(PAPER, one, result(1.2), []) for one in claims]
    assert [judged.verdict for judged in both] == [Verdict.HOLDS, Verdict.HOLDS]
    assert counted(both)[Verdict.HOLDS] == 1


def test_what_was_not_measured_is_said() -> None:
    assert verdict(WITHIN, None) is Verdict.NOT_MEASURED
    other, of_recipe = claim(WITHIN.check, read=Reading(ratio=["slow", "other"])), claim(WITHIN.check)
    without = Comparison(Claim("a-paper", "Figure 1", "x", 1.2, "speed"))
    assert verdict(other, result(1.2)) is verdict(of_recipe, result(1.2), without) is Verdict.NOT_MEASURED


def test_points_whose_variants_have_several_plans_do_not_count() -> None:
    alike, of = claim(WITHIN.check, read=Reading(ratio=RATIO.ratio, alike=["slow", "fast"])), result(1.2)
    for plan, said in (("a", Verdict.HOLDS), ("b", Verdict.NOT_MEASURED)):
        of.points[0].facts["plans"] = {"slow": "a", "fast": plan}
        assert verdict(alike, of) is said


def test_claims_without_a_result_say_why() -> None:
    options = {"result": "", "value": None}
    assert verdict(claim(Check(), tests="tests/a.py", **options), None) is Verdict.TESTED
    assert verdict(claim(Check(), needs="a GPU", command="run", **options), None) is Verdict.HARDWARE
    assert verdict(claim(Check(), missing="not built", **options), None) is Verdict.NO_RECIPE


def test_one_value_that_fails_is_enough() -> None:
    both = result(1.2)
    both.add(Point({"case": 2}, {}, [Row("slow", "step", "ms", [1.0]), Row("fast", "step", "ms", [1.0])]))
    assert verdict(WITHIN, both) is Verdict.FAILS
    assert verdict(claim(WITHIN.check, read=Reading(ratio=RATIO.ratio, at={"case": 2})), both) is Verdict.FAILS
    assert verdict(claim(Check(at_least=1), read=RATIO), both) is Verdict.HOLDS


@pytest.mark.parametrize(
    ("check", "published", "unit", "bounds"),
    [
        (Check(within=0.25), 1.2, "x", (1.15, 1.25)),  # of a speedup, the gain counts
        (Check(within=0.25), 0.8, "x", (0.6, 1.0)),
        (Check(within=0.25), 40.0, "ms", (30.0, 50.0)),
        (Check(at_least=1), None, "x", (1, inf)),
        (Check(at_most=3), 3.0, "%", (-inf, 3)),
        (Check(at_least=1.1, at_most=1.3), None, "x", (1.1, 1.3)),
    ],
)
def test_bounds(check: Check, published: float | None, unit: str, bounds: tuple[float, float]) -> None:
    assert accepted(check, published, unit) == pytest.approx(bounds)
    with pytest.raises(ValueError, match="needs a value"):
        accepted(Check(within=0.25), None, "x")


def test_inside_compares_quartiles() -> None:
    assert inside(Spread(2, 1, 3), 1, 3) is True
    assert inside(Spread(2, 1, 3), 2.5, 4) is None
    assert inside(Spread(2, 1, 3), 1.5, 2.5) is None  # quartiles on both sides of the whole range
    assert inside(Spread(2, 1, 3), 3.5, 4) is False


def series(*values: tuple[float, float, float]) -> list[Value]:
    return [Value("", Spread(mid, low, high), None, place) for place, (low, mid, high) in enumerate(values)]


RISING = series((1, 1.1, 1.2), (1.1, 1.2, 1.3), (1.3, 1.4, 1.5))


@pytest.mark.parametrize(
    ("trend", "values", "decided"),
    [
        ("rises", RISING, True),
        ("falls", RISING, False),
        ("rises", series((1, 1.1, 1.2), (0.8, 0.85, 0.9), (1.3, 1.4, 1.5)), False),  # a clear step down on the way
        ("rises", series((1, 1.1, 1.2), (1, 1.1, 1.2)), None),
        ("falls", series((1, 1.1, 1.3), (1, 1.05, 1.2)), None),
        ("rises", series((1, 1, 1), (1, 1, 1)), False),  # exact values that do not rise
        ("rises", series((1, 1.1, 1.2)), None),  # one value has no trend
        ("constant", series((0.99, 1, 1.01), (0.98, 1, 1.02)), True),
        ("constant", series((0.9, 1, 1.01), (0.98, 1, 1.02)), None),
        ("constant", RISING, False),
    ],
)
def test_trends(trend: str, values: list[Value], decided: bool | None) -> None:
    assert along(Check(trend=trend, within=0.05), values) is decided
    assert along(Check(trend=trend, within=0.05), values[::-1]) is decided  # places count, not the order of points


def test_values_come_from_rows_facts_and_lines() -> None:
    made = result(1.25, 1.25)
    made.points[0].facts["layers"] = 7

    def read(*lines: Comparison, **how: object) -> list[float]:
        published = claim(Check(at_least=0), read=Reading(**how))  # type: ignore[arg-type]
        return [value.measured.median for value in values_of(PAPER, published, made, lines)]

    assert read(ratio=["slow", "fast"]) == [1.25]
    assert read(difference=["slow", "fast"]) == [2.0]
    assert read(row="slow") == [10.0]
    assert read(fact="layers") == [7.0]
    assert read(fact="layers", at={"case": "none"}) == []
    mine = Comparison(Claim("a-paper", "Figure 1", "x", 1.2, "speed"), Spread(3, 3, 3), "same kernel")
    other = Comparison(Claim("a-paper", "Figure 2", "x", 1.2, "speed"), Spread(4, 4, 4), "same kernel")
    target = Comparison(Target("speed", "x", 2), Spread(5, 5, 5))
    assert read(mine, other, target) == [3]
    assert read(mine, other, target, lines={"note": "another"}) == []
    assert read(mine, other, target, lines={"what": "speed"}) == [3, 4]
    assert read(mine, other, target, lines={"where": "target"}) == [5]


def test_points_lie_along_an_axis_a_fact_or_a_row() -> None:
    made = result(1.25)
    made.points = [
        Point({"size": size}, {}, [Row("slow", "step", "ms", [float(ms)])], facts={"depth": depth})
        for size, ms, depth in (("L", 1, 3), ("S", 3, 2), ("M", 2, 1))
    ]

    def order(**how: object) -> list[str]:
        published = claim(Check(trend="rises"), read=Reading(row="slow", **how))  # type: ignore[arg-type]
        values = values_of(PAPER, published, made, [])
        return [value.label.removeprefix("size=") for value in sorted(values, key=lambda value: value.place)]

    assert order(over="size", order=["S", "M", "L"]) == ["S", "M", "L"]
    assert order(over="size", order=["L", "S"]) == ["L", "S"]  # M is of no account
    assert order(over="depth") == ["M", "S", "L"]
    assert order(over_row=["slow", "step"]) == ["L", "M", "S"]
    assert order(over_row=["fast", "step"]) == []
    made.points[1].facts.clear()
    assert order(over="depth") == ["M", "L"], "what a try does not have is left out"


def test_a_recipes_own_reason_is_taken_where_none_is_written() -> None:
    note = "simulated; does not hold: too few blocks"
    line = Comparison(Claim("a-paper", "Figure 1", "x", 1.2, "speed"), Spread(3, 3, 3), note)
    judged = judge(PAPER, claim(Check(within=0.25)), result(1.2), [line])
    assert (judged.verdict, judged.why) == (Verdict.FAILS, "too few blocks")


@pytest.mark.parametrize(("rounds", "said"), [([1.02, 1.03, 0.99], None), ([1.02, 1.03, 1.04, 1.01, 0.9], True)])
def test_fewer_than_five_rounds_decide_by_all_of_them(rounds: list[float], said: bool | None) -> None:
    assert inside(spread(rounds), 1.0, inf) is said
    assert judged(spread(rounds)) == ("faster" if said else "undecided")
