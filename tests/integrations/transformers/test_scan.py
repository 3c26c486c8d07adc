"""`convert` on the model of a ``transformers.Trainer``: no object is needed, as parameters stay what they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
from transformers import Trainer

from retime import ScanGRU, convert, convert_back
from retime.integrations.transformers import FusedOptimizer
from support.transformers_trainers import VOCABULARY, Left, assert_same, fit, trainer

WIDTH = 16


class Tagger(nn.Module):
    """A recurrent language model as the Trainer takes one: it gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger(folder: Path, **options: Any) -> Trainer:
    return trainer(folder, net=Tagger(), optim="sgd", gradient_accumulation_steps=3, **options)


def assert_near(plain: Left, ours: Left) -> None:
    """The same up to rounding: a scan adds up in another order."""
    torch.testing.assert_close(plain.tensors, ours.tensors, rtol=1e-4, atol=1e-6)
    assert [line.keys() for line in plain.log] == [line.keys() for line in ours.log]
    for one, other in zip(plain.log, ours.log, strict=True):
        assert other == pytest.approx(one, rel=1e-3)


def test_a_converted_model_trains_as_before(tmp_path: Path) -> None:
    habits = {"eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.5}
    plain, ours = (tagger(tmp_path, **habits) for _ in range(2))
    report = convert(ours.model, "blelloch")
    assert report.swapped == {"rnn": "GRU -> ScanGRU"}
    assert type(ours.model.rnn) is ScanGRU
    left = fit(ours)
    assert_near(fit(plain), left)
    assert any("eval_loss" in line for line in left.log)
    convert_back(ours.model)
    assert_near(fit(plain), fit(ours))


def test_checkpoints_resume_in_both_directions(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}

    def run(folder: str, scans: bool, resume: str | None = None) -> Left:
        one = tagger(tmp_path / folder, **saving)
        if scans:
            convert(one.model, "blelloch")
        left = fit(one, resume_from_checkpoint=None if resume is None else str(tmp_path / resume / "checkpoint-2"))
        assert isinstance(one.model.rnn, ScanGRU) is scans
        return left

    plain, ours = run("plain", scans=False), run("ours", scans=True)
    assert_near(plain, ours)
    resumed = run("resumed", False, "plain")
    for folder, scans, resume in (("a", False, "ours"), ("b", True, "plain"), ("c", True, "ours")):
        assert_near(resumed, run(folder, scans, resume))


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.filterwarnings("ignore:the log has no grad_norm")
def test_fusion_beside_it_changes_no_bit(mode: str, tmp_path: Path) -> None:
    alone, fused = (tagger(tmp_path, max_grad_norm=0.0 if mode == "backward" else 1.0) for _ in range(2))
    for one in (alone, fused):
        convert(one.model, "blelloch")
    given = FusedOptimizer(fused, mode)
    assert_same(fit(alone), fit(fused), norms=mode != "backward")
    assert given.report().fused_updates > 0
