"""The peer of the pipeline recipes: what one writes to train a transformer with torch.distributed.pipelining alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
_IN_A_V = ("ZBVZeroBubble", "DualPipeV")
_ONE_STAGE = ("GPipe", "1F1B")


class TorchPipeline:
    """A transformer cut by hand into stages of equally many blocks, on one of torch's schedules.

    Args:
        model: of `retime.recipes.models.hub`: GPT-2 with a language model's head, or BERT with one for masked tokens.
        schedule: torch's name, and how many stages a rank has: ``"Interleaved1F1B 2"``.
        micro_batches: of each batch.
        loss: of the last stage's output and targets, the mean over samples.

    Raises:
        ValueError: no schedule of torch's, or a model that nobody has cut.
    """

    def __init__(self, model: nn.Module, schedule: str, micro_batches: int, loss: Loss) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        name, _, chunks = schedule.partition(" ")
        kind: Any = getattr(schedules, f"Schedule{name}", None)
        if kind is None:
            raise ValueError(f"peers: torch has no schedule {name!r}: name one as in 'Interleaved1F1B 2'")
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._stages = ranks * (1 if name in _ONE_STAGE else 2 if name in _IN_A_V else int(chunks or 2))
        modules = stages_of(model, self._stages)
        self.mine = [stage for stage in range(self._stages) if self._rank_of(stage, ranks, name) == rank]
        for stage, module in enumerate(modules):
            if stage not in self.mine:
                module.requires_grad_(False)
        self._model = model
        stages = [PipelineStage(modules[one], one, self._stages, torch.device("cpu")) for one in self.mine]
        self._schedule = kind(stages[0] if name in _ONE_STAGE else stages, micro_batches, loss_fn=loss)

    @staticmethod
    def _rank_of(stage: int, ranks: int, name: str) -> int:
        return min(stage, 2 * ranks - 1 - stage) if name in _IN_A_V else stage % ranks

    def train(self, batch: tuple[Tensor, Tensor]) -> float:
        """Add a batch's gradients to ``.grad``; returns the loss on the last stage's rank, 0 on others."""
        first = (batch[0],) if 0 in self.mine else ()
        losses: list[Tensor] = []
        last = {"target": batch[1], "losses": losses} if self._stages - 1 in self.mine else {}
        self._schedule.step(*first, return_outputs=False, **last)
        return float(torch.stack(losses).mean()) if losses else 0.0


def stages_of(model: nn.Module, stages: int) -> list[nn.Module]:
    """Blocks in equal shares, the embedding with the first and the head with the last.

    Raises:
        ValueError: neither of the two models, or blocks that do not divide.
    """
    front, blocks, behind = _parts_of(model)
    if len(blocks) % stages:
        raise ValueError(f"peers: {len(blocks)} blocks do not divide into {stages} stages")
    share = len(blocks) // stages
    parts: list[nn.Module] = []
    for stage in range(stages):
        layers = list(blocks[stage * share : (stage + 1) * share])
        parts.append(_Stage(front if stage == 0 else None, layers, behind if stage + 1 == stages else None))
    return parts


class _Stage(nn.Module):
    def __init__(self, front: nn.Module | None, blocks: Sequence[nn.Module], behind: nn.Module | None) -> None:
        super().__init__()
        self.front, self.blocks, self.behind = front, nn.ModuleList(blocks), behind

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.front is None else self.front(given)
        for block in self.blocks:
            answer = block(hidden)
            hidden = answer if isinstance(answer, Tensor) else answer[0]
        return hidden if self.behind is None else self.behind(hidden)


class _TokensAndPositions(nn.Module):
    """GPT-2's embedding."""

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, given: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(given) + self.positions(torch.arange(given.shape[1], device=given.device))
        return embedded


def _parts_of(model: nn.Module) -> tuple[nn.Module, Sequence[nn.Module], nn.Module]:
    inner: Any = getattr(model, "model", model)
    name = type(inner).__name__
    if name == "GPT2LMHeadModel":
        body = inner.transformer
        return _TokensAndPositions(body.wte, body.wpe), body.h, nn.Sequential(body.ln_f, inner.lm_head)
    if name == "BertForMaskedLM":
        return inner.bert.embeddings, inner.bert.encoder.layer, inner.cls
    raise ValueError(f"peers: {name} was not cut by hand for torch's schedules: leave the peers out, with peers=[]")
