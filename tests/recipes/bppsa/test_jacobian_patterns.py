"""Patterns of Jacobians are where autograd's can be other than zero; the recipe counts places where they are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from retime.mechanisms.scan import CsrPattern, transposed_jacobian
from retime.recipes.bppsa import convolutional_jacobians
from retime.recipes.bppsa.convolutional_jacobians import NON_ZERO, OTHERS, PLACES, STORED, Patterns
from retime.recipes.core.results import Result
from support.recipes import assert_draws, settings_for


def run(folder: Path, *overrides: str) -> Result:
    settings = settings_for("experiment=bppsa_fig5", "image_size=4", *overrides)
    return Patterns().run(settings, folder, Console(quiet=True))


def test_stored_places_are_those_that_can_be_non_zero(tmp_path: Path) -> None:
    result = run(tmp_path)
    convolution, pool, relu = result.points
    assert [point.facts[OTHERS] for point in result.points] == [0, 0, 0]
    assert convolution.values(STORED, PLACES) == convolution.values(NON_ZERO, PLACES) == [3 * 2 * 10**2]
    assert pool.values(STORED, PLACES) == relu.values(STORED, PLACES) == [32]
    assert pool.values(NON_ZERO, PLACES)[0] <= 8  # one input a window
    assert_draws(Patterns(), result, tmp_path)
    assert "convolution: 48 x 32, 60.9 % guaranteed zeros; 0 places differ over 65 inputs" in " ".join(
        Patterns().notes(result)
    )


def test_a_place_too_many_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(layer: Any, inputs: torch.Tensor) -> Any:
        outputs, found = transposed_jacobian(layer, inputs)
        return outputs, SimpleNamespace(pattern=CsrPattern.full(found.pattern.rows, found.pattern.columns))

    monkeypatch.setattr(convolutional_jacobians, "transposed_jacobian", full)
    (point,) = run(tmp_path, "operators=[relu]", "rounds=8").points
    assert point.facts[OTHERS] == 32 * 32 - 32
