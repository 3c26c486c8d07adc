"""TRL's SFTTrainer, which inherits from `transformers.Trainer`: weights, states and log as those of the plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install trl")
pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from retime.integrations.transformers import FusedOptimizer, MemoryBudget
from support.transformers_trainers import QUIET, VOCABULARY, assert_same, fit, gpt2, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:the log has no grad_norm"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers about what TRL asks it
]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a number, made here: nothing is downloaded."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0", unk_token="w0")


def sft(folder: Path, **options: Any) -> Any:
    """A trainer of token numbers; 7 batches an epoch, so that windows of 3 end with a short one."""
    batch = options.setdefault("per_device_train_batch_size", 2)
    rows = [{"input_ids": row["input_ids"].tolist()} for row in texts(7 * batch)]
    own = {"output_dir": str(folder), "gradient_accumulation_steps": 3, "bf16": False}
    config = trl.SFTConfig(**QUIET | own | options)
    return trl.SFTTrainer(gpt2(), config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


GIVEN: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Callable[[Any], bool]]] = {
    "forward": (lambda one: FusedOptimizer(one, "forward"), {}, lambda report: report.fused_updates > 0),
    "backward": (
        lambda one: FusedOptimizer(one, "backward"), {"max_grad_norm": 0}, lambda report: report.fused_updates > 0
    ),
    "budget": (
        lambda one: MemoryBudget(one, "1GiB", dry_run="off", say=str),  # whose first step moves all that it saves
        {},
        lambda reports: reports[0].offload.storages > 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_the_weights_of_the_plain_trainer(name: str, checkpointed: bool, tmp_path: Path) -> None:
    """With layers computed again in the backward pass, which is SFTConfig's own default, and without."""
    give, options, was_on = GIVEN[name]
    options = {"gradient_checkpointing": checkpointed} | options
    before = torch.nn.utils.parameters_to_vector(gpt2().parameters())
    plain = sft(tmp_path, **options)
    expected = fit(plain)
    assert not torch.equal(before, torch.nn.utils.parameters_to_vector(plain.model.parameters()))
    ours = sft(tmp_path, **options)
    given = give(ours)
    assert_same(expected, fit(ours), norms=name != "backward")
    assert was_on(given.report())
