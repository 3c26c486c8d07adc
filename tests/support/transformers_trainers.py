"""Small trainers of transformers, models from configurations alone, and what a training leaves."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH = 31, 8


def gpt2() -> GPT2LMHeadModel:
    """A language model: tied embeddings, dropout, a loss that counts ``num_items_in_batch``."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def bert() -> BertForSequenceClassification:
    """A classifier: its loss takes no ``num_items_in_batch``, so the Trainer divides by the accumulated batches."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3)
    )


def texts(samples: int) -> list[dict[str, Tensor]]:
    """Of one length, with labels that are ignored at the end: each a different number."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = ids.clone()
    for row, label in enumerate(labels):
        label[LENGTH - row % 4 :] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def sentences(samples: int) -> list[dict[str, Tensor]]:
    """Each of one of three classes."""
    classes = torch.randint(3, (samples,), generator=torch.Generator().manual_seed(2))
    return [
        {"input_ids": one["input_ids"], "labels": label} for one, label in zip(texts(samples), classes, strict=True)
    ]


QUIET: dict[str, Any] = {
    **{"num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1, "save_strategy": "no"},
    **{"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False},
}
"""Arguments of a short training on a processor that prints and writes nothing."""
MODELS = {"gpt2": (gpt2, texts), "bert": (bert, sentences)}


def trainer(folder: Path, model: str = "gpt2", cls: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """A trainer of 7 batches an epoch, so that windows of 3 end with a short one."""
    build, data = MODELS[model]
    batch = options.setdefault("per_device_train_batch_size", 2)
    names = ("optimizers", "callbacks", "compute_loss_func", "compute_metrics", "data_collator", "model_init")
    own = {name: options.pop(name) for name in names if name in options}
    if "model_init" not in own:
        own["model"] = options.pop("net", None) or build()
    if options.get("eval_strategy"):
        own["eval_dataset"] = data(6)
    return cls(args=TrainingArguments(output_dir=str(folder), **QUIET | options), train_dataset=data(7 * batch), **own)


def fit(one: Trainer, **options: Any) -> "Left":
    """Train from one state of the random generators; returns what is left."""
    set_seed(5)
    one.train(**options)
    return left_by(one)


class Left(NamedTuple):
    """What a training leaves: copies of parameters and of the optimizer's state, and what was logged."""

    tensors: dict[str, Tensor]
    log: list[dict[str, Any]]


TIMES = ("runtime", "per_second")


def left_by(trained: Trainer) -> Left:
    """Return what a training left, but for the times that it logged."""
    tensors = {name: value.detach().clone() for name, value in trained.model.state_dict().items()}
    for index, state in trained.optimizer.state_dict()["state"].items():
        tensors |= {f"{index} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    log = [
        {name: value for name, value in one.items() if not name.endswith(TIMES)} for one in trained.state.log_history
    ]
    return Left(tensors, log)


def assert_same(plain: Left, ours: Left, norms: bool = True) -> None:
    """Raise unless weights and optimizer have the same bits and the log the same numbers.

    Args:
        plain: what the plain Trainer left.
        ours: what ours left.
        norms: whether those of gradients are compared, which backward mode does not log.
    """
    assert plain.tensors.keys() == ours.tensors.keys()
    assert [name for name in plain.tensors if not torch.equal(plain.tensors[name], ours.tensors[name])] == []
    logs = [[{k: v for k, v in one.items() if norms or k != "grad_norm"} for one in log] for log in (plain[1], ours[1])]
    assert repr(logs[0]) == repr(logs[1])  # NaN is NaN
