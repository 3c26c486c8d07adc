"""The papers' claims as data: complete, unambiguous, and refused where they are not."""

import dataclasses
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from retime.recipes.core.claims import PACKAGES, Check, Claim, Finding, Paper, Published, check, paper
from retime.recipes.core.verdicts import Verdict, judge

ROOT = Path(__file__).parents[3]
CLAIM = Published(1, "a-claim", "Figure 1", "speed", "x", 1.2, check=Check(within=0.25), result="a-paper/figure-1/cpu")


def of(*claims: Published, findings: list[Finding] | None = None) -> Paper:
    return Paper("a-paper", "A", "Somebody 2020", "A title", {}, claims=list(claims), findings=findings or [])


@pytest.mark.parametrize(("package", "numbers"), [*zip(PACKAGES, (23, 19, 46, 25, 40), strict=True)])
def test_every_figure_table_and_statement_has_its_number(package: str, numbers: int) -> None:
    assert max(claim.number for claim in paper(package).claims) == numbers


@pytest.mark.parametrize("package", PACKAGES)
def test_what_claims_name_is_there_and_numbers_have_units(package: str) -> None:
    one = paper(package)
    missing = [claim.tests for claim in one.claims if claim.tests and not (ROOT / claim.tests).exists()]
    missing += [folder for folders in one.code.values() for folder in folders if not (ROOT / folder).exists()]
    missing += sorted(set(one.sizes) - {claim.result for claim in one.claims})
    assert missing == []
    assert [claim.id for claim in one.claims if claim.value is not None and not claim.unit] == []
    values = re.compile(
        "hardly gains|gains nothing|way gains|costs time instead|changes its sign|layers are exposed on"
    )
    assert [claim.id for claim in one.claims if values.search(claim.why)] == [], (
        "typed, so that another record may differ"
    )


def test_a_claim_is_asked_for_by_its_name() -> None:
    one = of(CLAIM, dataclasses.replace(CLAIM, number=2, id="trend", value=None))
    assert (one.claim("a-claim").value, one.claim("a-claim").where) == (1.2, "Figure 1")
    for name in ("trend", "another"):
        with pytest.raises(KeyError, match=f"no claim '{name}' with a value"):
            one.claim(name)


def test_numbers_and_targets_are_asked_for_as_claims_are() -> None:
    theirs = {"paper": "b", "where": "here", "what": "size", "value": 4, "unit": "MB"}
    numbers = {"other": {"where": "Figure 2", "what": "size", "value": 3}, "theirs": theirs}
    targets = {"least": {"what": "speed", "value": 1.1}, "most": {"what": "size", "value": 2, "at_most": True}}
    one = dataclasses.replace(of(CLAIM), numbers=numbers, targets=targets)
    assert one.claim("other") == Claim("a-paper", "Figure 2", "x", 3, "size")
    assert one.claim("theirs") == Claim("b", "here", "MB", 4, "size")
    assert one.claim("a-claim").value == 1.2
    assert (one.target("least").met(1.2), one.target("most").met(3)) == (True, False)
    with pytest.raises(KeyError, match="missing"):
        one.target("missing")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_number_and_target_of_a_paper_can_be_asked_for(package: str) -> None:
    one = paper(package)
    assert not set(one.numbers) & {claim.id for claim in one.claims}, "a claim would be hidden behind a number"
    assert all(one.claim(name).where for name in one.numbers)
    targets = [name for name, wanted in one.targets.items() if isinstance(wanted, dict) and "value" in wanted]
    assert all(one.target(name).what for name in targets)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([dataclasses.replace(CLAIM, number=2)], "without a gap"),
        ([CLAIM, CLAIM], "stands there twice"),
        ([dataclasses.replace(CLAIM, result="")], "it has none"),
        ([dataclasses.replace(CLAIM, tests="a.py")], "give one of result, tests, needs and missing"),
        ([dataclasses.replace(CLAIM, check=Check())], "what would confirm it"),
        ([dataclasses.replace(CLAIM, check=Check(trend="grows"))], "rises, falls, constant, not grows"),
        ([dataclasses.replace(CLAIM, kind="guessed")], "not guessed"),
        ([dataclasses.replace(CLAIM, result="", needs="a GPU")], "give the command"),
    ],
)
def test_claims_that_cannot_be_judged_are_refused(claims: list[Published], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(of(*claims))


def test_findings_name_claims() -> None:
    with pytest.raises(ValueError, match=r"names \['another'\]"):
        check(of(CLAIM, findings=[Finding("Something.", ["another"])]))


def test_misspelt_keys_are_refused() -> None:
    with pytest.raises(OmegaConfBaseException, match="valeu"):
        OmegaConf.merge(OmegaConf.structured(CLAIM), {"valeu": 1})


def test_a_recipe_without_a_result_is_not_measured() -> None:
    assert judge(of(CLAIM), CLAIM, None, []).verdict is Verdict.NOT_MEASURED
