"""What a pipeline makes of logged numbers: the whole batch's, or a warning by name."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from retime import DifferenceWarning
from retime.foundations.parts import balanced_parts
from retime.mechanisms.pipeline import Examples, PipelineError
from retime.mechanisms.pipeline.calls import LayerInterceptors
from retime.mechanisms.pipeline.losses import look_at_losses
from retime.strategies.support.parts_log import LOGGED, LoggedCall
from retime.strategies.support.pipeline_log import PipelineLog, _misfit

Logs = Callable[[Tensor, dict[str, Tensor]], dict[str, Any]]


class Module(LightningModule):
    def __init__(self, of: Callable[[Tensor], Tensor], logs: Logs, draws: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.of, self.logs, self.draws = of, logs, draws

    def step(self, part: dict[str, Tensor]) -> Tensor:
        error = (self.net(part["x"]) - part["y"]).square()
        loss = self.of(error)
        if self.draws:
            loss = loss * (1 + torch.rand(()))
        for name, value in self.logs(loss, part).items():
            self.log(name, value)
        return loss


def batch(marked: int = 12) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    mask = torch.zeros(12)
    mask[:marked] = 1
    return {"x": torch.randn(12, 4, generator=drawn), "y": torch.randn(12, 3, generator=drawn), "mask": mask}


def shown(module: Module, others: dict[str, Tensor] | None = None) -> tuple[dict[str, float], list[str]]:
    """What a batch shows behind the first, and what was said."""
    log, first, layers = PipelineLog(module), batch(), list(module.net)

    def step(part: dict[str, Tensor]) -> dict[str, Any]:
        with log.micro_batch() as calls:
            return {"loss": module.step(part), LOGGED: calls}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with log.batch():
            parts = balanced_parts(first, 3)
            weights, look = look_at_losses(
                module, step, first, parts, gates=LayerInterceptors(layers), names=["0", "1", "2"]
            )
            log.look(look, weights)
            others = batch() if others is None else others
            parts = balanced_parts(others, 3)
            module.later = True
            calls = [step(part)[LOGGED] for part in parts]
            logged, _ = log.collected(calls, weights.of(others, parts), [len(part["x"]) for part in parts])
    said = [str(one.message) for one in caught if one.category is DifferenceWarning]
    return {call.name: float(call.value) for call in logged}, said


def test_a_mean_over_samples_beside_a_sum() -> None:
    module = Module(lambda error: error.sum(), lambda loss, part: {"mean": loss.detach() / len(part["x"])})
    numbers, said = shown(module)
    assert not said
    whole = batch()
    expected = (module.net(whole["x"]) - whole["y"]).square().sum() / 12
    assert numbers["mean"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_what_is_no_mean_beside_a_sum_is_not_added_up() -> None:
    module = Module(lambda error: 0.01 * error.sum(), lambda loss, part: {"ppl": loss.detach().exp()})
    found, (text,) = shown(module)
    assert "the logged value 'ppl'" in text
    assert "it goes through `exp`" in text
    assert found["ppl"] < 2


def test_what_is_first_logged_later_is_named() -> None:
    def logs(loss: Tensor, part: dict[str, Tensor]) -> dict[str, Any]:
        return {"ppl": loss.exp(), "rate": 0.1} if getattr(module, "later", False) else {}

    module = Module(lambda error: error.mean(), logs)
    found, (text,) = shown(module)
    assert text.startswith("the logged value 'ppl' was not logged in the first batch")
    assert found["rate"] == pytest.approx(0.1)


def test_a_mean_that_some_micro_batches_log_is_over_those() -> None:
    module = Module(lambda error: error.mean(), lambda loss, part: {"mean": loss} if part["mask"].any() else {})
    found, (text,) = shown(module, batch(marked=9))
    assert "'mean' was logged by some micro-batches only, and is the mean over those" in text
    whole = batch()
    expected = (module.net(whole["x"]) - whole["y"])[:9].square().mean()
    assert found["mean"] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("draws", [False, True])
def test_numbers_of_python(draws: bool) -> None:
    """Those that follow from alike micro-batches alone, or from losses that draw random numbers, are not judged."""

    def logs(loss: Tensor, part: dict[str, Tensor]) -> dict[str, Any]:
        marked = float(part["mask"].sum())
        counted = float(numpy.count_nonzero(part["mask"].numpy()))
        of_mask = {"any": float(part["mask"].any()), "marked": max(1.0, marked), "counted": counted}
        return {"rate": 0.1, "loss": loss, **of_mask, "of loss": float(loss)}

    _, said = shown(Module(lambda error: error.mean(), logs, draws), batch(marked=2))
    named = [text.split("'")[1] for text in said]
    assert named == ["any", "marked", "counted", *(["of loss"] if draws else [])]
    assert all("it is a Python number" in text for text in said)


def test_what_a_part_without_labels_logs_hides_nothing() -> None:
    """A function of the loss is told, though a part that counts for nothing logs a thousand times as much."""

    def logged(*values: float) -> list[dict[str, Any]]:
        return [{LOGGED: {"ppl": LoggedCall("ppl", value=value)}} for value in values]

    (whole,), parts = logged(1.12), logged(1.1454, 8103.0, 1.0831, 1.1494)
    example = Examples(whole, parts, [1 / 3, 0.0, 1 / 3, 1 / 3], [1, 1, 1, 1])
    look: Any = SimpleNamespace(examples=[example], low_precision=False)
    text = _misfit("weights", "ppl", look)
    assert text == "1.126 for 1.12 in the first batch"


def test_errors_of_a_pipeline_are_raised_from_noise_too() -> None:
    calls = []

    def of(error: Tensor) -> Tensor:
        if float(error.detach().abs().max()) > 100:
            calls.append(1)
            raise PipelineError("not with these")
        return error.mean()

    with pytest.raises(PipelineError, match="not with these"):
        shown(Module(lambda error: of(1000 * error if error.mean() > 3 else error), lambda loss, part: {}))
