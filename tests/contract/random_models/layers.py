"""The layers that random models are made of; all map [B, T, X] to [B, T, X].

A layer is called with its inputs and the `Batch`, of which some read tokens, lengths or the mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

KINDS: dict[str, Callable[..., nn.Module]] = {}
TOKENS = 7


class Batch(NamedTuple):
    """`inputs` [B, T, X], `tokens` [B, T], `labels` [B, T], `lengths` [B], `mask` [B, T], `target` [B, T, X]."""

    inputs: Tensor
    tokens: Tensor
    labels: Tensor
    lengths: Tensor
    mask: Tensor
    target: Tensor


def kind(make: Any) -> Any:
    KINDS[make.__name__] = make
    return make


def over(module: nn.Module, fold: Callable[[Tensor], Tensor] = lambda x: x, back: Callable[..., Tensor] | None = None):
    """A layer that calls `module` on its input as folded, and unfolds what comes out."""
    return Over(module, fold, back or (lambda y, x: y))


class Over(nn.Module):
    def __init__(self, module: nn.Module, fold: Any, back: Any) -> None:
        super().__init__()
        self.module, self.fold, self.back = module, fold, back

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.back(self.module(self.fold(x)), x)


class Call(nn.Module):
    """A layer given as a function of its module, its inputs and the batch."""

    def __init__(self, function: Callable[..., Tensor], **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in modules.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "": nn.Identity,
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu_": lambda: nn.SiLU(inplace=True),
    "elu_": lambda: nn.ELU(inplace=True),
    "leaky_": lambda: nn.LeakyReLU(0.1, inplace=True),
    "softmax": lambda: nn.Softmax(-1),
}


def swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def unswap(y: Tensor, _: Tensor) -> Tensor:
    return y.transpose(1, 2)


@kind
def linear(x: int, act: str = "", bias: bool = True) -> nn.Module:
    return over(nn.Sequential(nn.Linear(x, x, bias=bias), ACTIVATIONS[act]()))


@kind
def flat_linear(x: int, time: int) -> nn.Module:
    return over(nn.Linear(x * time, x * time), lambda v: v.flatten(1), lambda y, v: y.view_as(v))


@kind
def mlp(x: int, act: str = "relu", drop: float = 0.0) -> nn.Module:
    return over(nn.Sequential(nn.Linear(x, 2 * x), ACTIVATIONS[act](), nn.Dropout(drop), nn.Linear(2 * x, x)))


@kind
def conv1d(x: int, act: str = "", size: int = 3) -> nn.Module:
    return over(nn.Sequential(nn.Conv1d(x, x, size, padding=size // 2), ACTIVATIONS[act]()), swap, unswap)


@kind
def depthwise(x: int, bias: bool = True) -> nn.Module:
    return over(nn.Conv1d(x, x, 3, padding=1, groups=x, bias=bias), swap, unswap)


@kind
def conv2d(x: int, channels: int = 2, norm: str = "", act: str = "relu") -> nn.Module:
    norms = {"": nn.Identity, "batch": lambda: nn.BatchNorm2d(channels), "group": lambda: nn.GroupNorm(1, channels)}
    first, last = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, 1, 3, padding=1)
    body = nn.Sequential(first, norms[norm](), ACTIVATIONS[act](), last)
    return over(body, lambda v: v.unsqueeze(1), lambda y, v: y.squeeze(1))


@kind
def layernorm(x: int, affine: bool = True) -> nn.Module:
    return over(nn.LayerNorm(x, elementwise_affine=affine))


@kind
def batchnorm(x: int, affine: bool = True, momentum: float | None = 0.1, stats: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(x, affine=affine, momentum=momentum, track_running_stats=stats)
    return over(norm, swap, unswap)


@kind
def embedding(x: int, padding: bool = False, max_norm: float | None = None, by_freq: bool = False) -> nn.Module:
    options = {"padding_idx": 0 if padding else None, "max_norm": max_norm, "scale_grad_by_freq": by_freq}
    return Call(lambda self, v, batch: v + self.table(batch.tokens), table=nn.Embedding(TOKENS, x, **options))


@kind
def positions(x: int, time: int) -> nn.Module:
    return Call(lambda self, v, batch: v + self.table.weight[: v.shape[1]], table=nn.Embedding(time, x))


@kind
def bag(x: int, mode: str = "mean") -> nn.Module:
    table = nn.EmbeddingBag(TOKENS, x, mode=mode)
    return Call(lambda self, v, batch: v + self.table(batch.tokens).unsqueeze(1), table=table)


def _recurrent(make: Any) -> Callable[..., nn.Module]:
    def build(
        x: int,
        layers: int = 1,
        both: bool = False,
        drop: float = 0.0,
        packed: bool = False,
        project: bool = False,
        state: bool = False,
        first: bool = True,
        bias: bool = True,
    ) -> nn.Module:
        options: dict[str, Any] = {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
        width = x // 2 if both else x
        if project:
            options["proj_size"], width = width, 2 * x
        rnn = make(x, width, dropout=drop if layers > 1 else 0.0, **options)
        return Call(_run_recurrent, rnn=rnn, packed=packed, state=state, first=first)

    return build


def _run_recurrent(self: Any, x: Tensor, batch: Batch) -> Tensor:
    inputs: Any = x if self.first else x.transpose(0, 1)
    if self.packed:
        lengths = batch.lengths.cpu()
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=self.first, enforce_sorted=False)
    out, state = self.rnn(inputs)
    if self.packed:
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=self.first, total_length=x.shape[1])
    if not self.first:
        out = out.transpose(0, 1)
    if self.state:
        last = (state[0] if isinstance(state, tuple) else state)[-1]
        out = out + last.mean(-1)[:, None, None]
    return out


def _cell(make: Any) -> Callable[..., nn.Module]:
    return lambda x: Call(_run_cell, cell=make(x, x))


def _run_cell(self: Any, x: Tensor, batch: Batch) -> Tensor:
    state, out = None, []
    for one in x.unbind(1):
        state = self.cell(one, state)
        out.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(out, 1)


@kind
def attention(x: int, causal: bool = False, padded: bool = False, drop: float = 0.0, weights: bool = False):
    heads = nn.MultiheadAttention(x, 2, dropout=drop, batch_first=True)
    return Call(_run_attention, heads=heads, causal=causal, padded=padded, weights=weights)


def _run_attention(self: Any, x: Tensor, batch: Batch) -> Tensor:
    time = x.shape[1]
    mask = torch.ones(time, time, dtype=torch.bool).triu(1) if self.causal else None
    padding = torch.arange(time) >= batch.lengths[:, None] if self.padded else None
    return self.heads(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=self.weights)[0]


@kind
def encoder(x: int, drop: float = 0.0, first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(x, 2, 2 * x, dropout=drop, batch_first=True, norm_first=first)
    return over(layer)


@kind
def sdpa(x: int, causal: bool = False) -> nn.Module:
    return Call(_run_sdpa, qkv=nn.Linear(x, 3 * x), out=nn.Linear(x, x), causal=causal)


def _run_sdpa(self: Any, x: Tensor, batch: Batch) -> Tensor:
    q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
    return self.out(attended.transpose(1, 2).flatten(2))


@kind
def pruned(x: int) -> nn.Module:
    layer = nn.Linear(x, x)
    prune.l1_unstructured(layer, "weight", 0.3)
    return over(layer)


@kind
def weight_shared_twice(x: int) -> nn.Module:
    """One weight, used as it is and transposed."""
    weight = nn.Parameter(torch.randn(x, x) / x)
    return Call(lambda self, v, _: F.linear(torch.tanh(F.linear(v, self.weight)), self.weight.t()), weight=weight)


@kind
def tied(x: int) -> nn.Module:
    """Two layers with one weight object."""
    first, last = nn.Linear(x, x), nn.Linear(x, x)
    last.weight = first.weight
    return over(nn.Sequential(first, nn.Tanh(), last))


@kind
def tied_embedding(x: int) -> nn.Module:
    """A table that is also the weight of what reads it."""
    table = nn.Embedding(TOKENS, x)
    return Call(lambda self, v, b: v + F.linear(self.table(b.tokens), self.table.weight).mean(-1, True), table=table)


@kind
def normalised(x: int) -> nn.Module:
    """A weight that is read through another function first."""
    weight = nn.Parameter(torch.randn(x, x) / x)
    return Call(lambda self, v, _: F.linear(v, F.normalize(self.weight, dim=1)), weight=weight)


@kind
def dropout(x: int, p: float = 0.3, inplace: bool = False) -> nn.Module:
    return over(nn.Dropout(p, inplace=inplace), lambda v: v * 1.0 if inplace else v)


KINDS |= {
    "bilinear": lambda x: Call(lambda self, a, b, _: self.module(a, b), module=nn.Bilinear(x, x, x)),
    "separable": lambda x: over(
        nn.Sequential(nn.Conv1d(x, x, 3, padding=1, groups=x), nn.Conv1d(x, x, 1)), swap, unswap
    ),
    "causal": lambda x: over(nn.Conv1d(x, x, 2), lambda v: F.pad(swap(v), (1, 0)), unswap),
    "transposed": lambda x: over(nn.Sequential(nn.ConvTranspose1d(x, x, 3, padding=1), nn.Tanh()), swap, unswap),
    "groupnorm": lambda x: over(nn.GroupNorm(2, x), swap, unswap),
    "rmsnorm": lambda x: over(nn.RMSNorm(x)),
    "instancenorm": lambda x: over(nn.InstanceNorm1d(x, affine=True), swap, unswap),
    **{"rnn": _recurrent(nn.RNN), "gru": _recurrent(nn.GRU), "lstm": _recurrent(nn.LSTM)},
    **{"rnn_cell": _cell(nn.RNNCell), "gru_cell": _cell(nn.GRUCell), "lstm_cell": _cell(nn.LSTMCell)},
    "scale": lambda x: Call(
        lambda self, v, _: v * self.weight, weight=nn.Parameter(torch.ones(x) + 0.1 * torch.randn(x))
    ),
    "prelu": lambda x: over(nn.PReLU()),
    "weight_norm": lambda x: over(nn.utils.parametrizations.weight_norm(nn.Linear(x, x))),
    "spectral_norm": lambda x: over(nn.utils.parametrizations.spectral_norm(nn.Linear(x, x))),
    "channel_dropout": lambda x: over(nn.Dropout1d(0.3), swap, unswap),
    "noise": lambda x: Call(lambda self, v, _: v + 0.1 * torch.randn_like(v) if self.training else v),
}
