"""Models and steps for pipelines: each entry gives a model, a training step and a batch."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 144  # a weight is 81 KiB: more than what is computed in order for being small
Made = tuple[nn.Module, Callable[[Any], Any], Any]


class Residual(nn.Module):
    """What the embedding gives goes into every layer: ranks without it in front must have a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, 1, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embed(tokens)
        weight, x = torch.sigmoid(self.gate(first)), first
        for block in self.blocks:
            x = torch.tanh(block(x, weight))
        return self.head(x)


class Tied(nn.Module):
    """The embedding is the head, and two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Between(nn.Module):
    """Residual connections stand between the layers, one of them written in place."""

    block: type[nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(self.block(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.through(self.embed(tokens)))

    def through(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            change = torch.tanh(block(x))
            if number == 5:
                x = x.clone()
                x += change
            else:
                x = x + change
        return x


class WritesInput(nn.Linear):
    """Writes into what it is given, as `ReLU(inplace=True)` does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.9).tanh_())


class Product(nn.Linear):
    """Takes two tensors."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * other)


class Doubled(Between):
    """Its layers are given the same tensor twice, as attention is."""

    block = Product

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x, x))
        return x


class InPlace(Between):
    """What the layers have written into goes on beside them."""

    block = WritesInput

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class InPlaceAlone(InPlace):
    """Nothing else uses what the layers have written into."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class InPlaceBetween(Between):
    """Code between the layers writes into what they return, once through a view."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.9)
            x[:, :2].add_(0.1)
            x.tanh_()
        return x


class Skipping(Between):
    """What all layers give goes past the later ones to the head."""

    def through(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            kept.append(block(x))
            x = torch.tanh(kept[-1])
        return torch.stack(kept).mean(0)


class Attributes(nn.Module):
    """No list of layers: attributes with functions between them, some of them a module deeper; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 11)  # not in the order of its call
        self.embed = nn.Embedding(11, WIDTH)
        self.body = Body()
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.Tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.body(self.act(self.embed(tokens))))
        return self.last(self.act(self.twice(x)))


class Body(nn.Module):
    """Called by `Attributes`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2, self.fc1 = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.fc3 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = self.norm(self.fc2(x).tanh())
        return torch.tanh(self.fc3(x))


class Checkpointed(Between):
    """Checkpoints around the layers; the last one has one in it, which may be reentrant."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks[-1] = _CheckpointsItself(WIDTH, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.blocks[-1](x[:, None].flatten(1))  # given a view


class _CheckpointsItself(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True) + x  # type: ignore[no-any-return]


def classified(kind: Callable[[], nn.Module], of: Callable[[Any], Tensor] = lambda outputs: outputs) -> Made:
    """Tokens, each with a class, which is learned from these of the outputs."""
    model = kind()
    batch = torch.randint(0, 11, (12,)), torch.randint(0, 11, (12,))
    return model, lambda part: nn.functional.cross_entropy(of(model(part[0])), part[1]), batch


def segments() -> Made:
    """Checkpoints that hold several layers."""
    model, _, batch = sequential()

    def step(part: Any) -> Tensor:
        given = part[0].clone().requires_grad_()
        return (checkpoint_sequential(model, 3, given, use_reentrant=False) - part[1]).square().mean()

    return model, step, batch


class TwoHeads(nn.Module):
    """A second head, which runs before the first or after it."""

    def __init__(self, *, is_first: bool = False) -> None:
        super().__init__()
        self.is_first = is_first
        self.embed, self.body = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.second = nn.Linear(WIDTH, 11), nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(self.embed(tokens)))
        if self.is_first:
            second = self.second(x)
            return self.head(x), second
        return self.head(x), self.second(x)


class UNet(nn.Module):
    """What goes down comes up again beside what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.deep, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        down = torch.relu(self.down(x))
        deep = torch.relu(self.deep(torch.relu(self.middle(down))))
        return self.up(torch.cat([deep, down], -1))


def sequential(layers: int = 8) -> Made:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    batch = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    return model, lambda part: (model(part[0]) - part[1]).square().mean(), batch


def summed() -> Made:
    model, _, batch = sequential()
    return model, lambda part: {"loss": (model(part[0]) - part[1]).square().sum() / 100}, batch


def residual() -> Made:
    model = Residual()
    batch = {"tokens": torch.randint(0, 11, (10,)), "labels": torch.randint(0, 3, (10,))}
    return model, lambda part: nn.functional.cross_entropy(model(part["tokens"]), part["labels"]), batch


def frozen() -> Made:
    """A frozen embedding, a frozen layer, and a layer that nobody calls."""
    model, step, batch = classified(Tied)
    model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.layers[1].requires_grad_(False)  # type: ignore[index]
    model.spare = nn.Linear(3, 3)
    return model, step, batch


def transformer(kind: str, *, checkpoints: bool = False) -> Made:
    """A small model of transformers, made from its configuration alone."""
    import transformers

    tokens = torch.randint(0, 101, (8, 12))
    if kind == "gpt2":
        sizes = {"n_layer": 4, "n_embd": WIDTH, "n_head": 2, "n_positions": 16, "vocab_size": 101}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    elif kind == "bert":
        sizes = {"num_hidden_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 2, "vocab_size": 101}
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 2 * WIDTH}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drops))
    else:
        sizes = {"num_hidden_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 2, "vocab_size": 101}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=2 * WIDTH))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, lambda part: model(input_ids=part["tokens"], labels=part["tokens"]).loss, {"tokens": tokens}


MODELS: dict[str, Callable[[], Made]] = {
    "sequential": sequential,
    "summed": summed,
    "residual": residual,
    "tied": partial(classified, Tied),
    "frozen": frozen,
    "between": partial(classified, Between),
    "doubled": partial(classified, Doubled),
    "in_place": partial(classified, InPlace),
    "in_place_between": partial(classified, InPlaceBetween),
    "in_place_alone": partial(classified, InPlaceAlone),
    "checkpointed": partial(classified, Checkpointed),
    "segments": segments,
    "two_heads": partial(classified, TwoHeads, itemgetter(0)),  # the loss does not use the second one
    "second_head_first": partial(classified, partial(TwoHeads, is_first=True), itemgetter(0)),
    "attributes": partial(classified, Attributes),
    "skipping": partial(classified, Skipping),
    "gpt2": partial(transformer, "gpt2"),
    "bert": partial(transformer, "bert"),
    "llama": partial(transformer, "llama"),
    "gpt2_checkpointed": partial(transformer, "gpt2", checkpoints=True),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> Made:
    """The same on all ranks."""
    torch.manual_seed(0)
    model, step, batch = MODELS[name]()
    return model.to(dtype), step, _in(dtype, batch)


def _in(dtype: torch.dtype, batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _in(dtype, value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_in(dtype, value) for value in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch
