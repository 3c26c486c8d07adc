"""From a seed to a `Spec`."""

import random
from typing import Any

from contract.random_models.spec import Node, Spec, Training

_ACTIVATIONS = ("", "relu", "relu_", "tanh", "gelu", "silu_", "elu_", "leaky_", "softmax")
_RECURRENT = {
    "layers": (1, 1, 2),
    "both": (False, False, True),
    "drop": (0.0, 0.3),
    "packed": (False, False, True),
    "project": (False,),
    "state": (False, True),
    "first": (True, True, False),
    "bias": (True, True, False),
}
_WITHOUT_OPTIONS = (
    *("add_", "slices", "masked", "chunks", "unsafe_chunks", "unsafe_split"),
    *("unbound", "expanded", "rolled", "reshaped", "detached", "partly_detached"),
    *("without_gradient", "read_value", "cumulative", "through_numpy", "over_samples", "tanh_"),
    *("relu_", "mul_", "counter", "running_mean", "constant", "own_function"),
)
# What each kind may be given.
_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "linear": {"act": _ACTIVATIONS, "bias": (True, True, False)},
    "flat_linear": {},
    "mlp": {"act": _ACTIVATIONS, "drop": (0.0, 0.0, 0.3)},
    "conv1d": {"act": _ACTIVATIONS, "size": (1, 3, 5)},
    "depthwise": {"bias": (True, False)},
    "separable": {},
    "causal": {},
    "conv2d": {"norm": ("", "batch", "group"), "act": _ACTIVATIONS},
    "transposed": {},
    "groupnorm": {},
    "layernorm": {"affine": (True, True, False)},
    "rmsnorm": {},
    "batchnorm": {"affine": (True, True, False), "momentum": (0.1, 0.1, None), "stats": (True, True, False)},
    "instancenorm": {},
    "embedding": {"padding": (False, True), "max_norm": (None, None, None, 0.5), "by_freq": (False, False, True)},
    "positions": {},
    "bag": {"mode": ("mean", "sum", "max")},
    "rnn": _RECURRENT,
    "gru": _RECURRENT,
    "lstm": _RECURRENT | {"project": (False, False, True)},
    "rnn_cell": {},
    "gru_cell": {},
    "lstm_cell": {},
    "attention": {
        "causal": (False, True),
        "padded": (False, False, True),
        "drop": (0.0, 0.0, 0.2),
        "weights": (False, True),
    },
    "encoder": {"drop": (0.0, 0.2), "first": (False, True)},
    "sdpa": {"causal": (False, True)},
    "scale": {},
    "prelu": {},
    "weight_norm": {},
    "spectral_norm": {},
    "pruned": {},
    "weight_shared_twice": {},
    "tied": {},
    "tied_embedding": {},
    "normalised": {},
    "dropout": {"p": (0.1, 0.5), "inplace": (False, True)},
    "channel_dropout": {},
    "noise": {},
    **{name: {} for name in _WITHOUT_OPTIONS},
}
_TWO_INPUTS = ("add", "multiply", "joined", "largest", "chosen", "bilinear")
_WRAPPERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "residual": {},
    "segment": {"reentrant": (False, True)},
    "every_other_step": {},
    "by_value": {"bound": (-0.1, 0.03, 0.1)},
    "without_gradient_of": {},
}
_OFTEN = ("linear", "mlp", "conv1d", "gru", "lstm", "layernorm", "attention", "embedding")
_RARE = ("over_samples", "running_mean", "through_numpy", "read_value", "batchnorm", "spectral_norm")
_INSIDE = tuple(k for k in _OPTIONS if k not in ("counter", "running_mean", "tanh_", "relu_", "mul_"))
_OPTIMIZERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {
        "lr": (0.05, 0.1),
        "momentum": (0.0, 0.0, 0.9),
        "weight_decay": (0.0, 0.01),
        "foreach": (None, True, False),
        "maximize": (False, False, False, True),
    },
    "Adam": {"lr": (0.01,), "amsgrad": (False, False, True), "eps": (1e-8, 1e-3), "foreach": (None, True, False)},
    "AdamW": {"lr": (0.01,), "weight_decay": (0.1,), "fused": (None, True), "eps": (1e-8, 1e-3)},
    "RMSprop": {"lr": (0.01,), "momentum": (0.0, 0.9), "centered": (False, True), "eps": (1e-8, 1e-3)},
    "Adagrad": {"lr": (0.02,), "lr_decay": (0.0, 0.1), "eps": (1e-10, 1e-3)},
    "NAdam": {"lr": (0.01,), "eps": (1e-3,)},
    "RAdam": {"lr": (0.01,), "eps": (1e-3,)},
    "Adamax": {"lr": (0.01,), "eps": (1e-3,)},
    "Adadelta": {"lr": (1.0,), "eps": (1e-3,)},
    "ASGD": {"lr": (0.05,)},
    "Rprop": {"lr": (0.01,)},
}
_LOSSES = (
    *("mean", "mean", "mean", "sum", "tokens", "tokens", "classes", "classes", "smoothed", "weighted_classes"),
    *("masked_mean", "by_lengths", "hardest", "top", "contrast", "penalty", "sum_and_mean"),
)
_BETWEEN = (
    *("ema", "clamp", "clamp_data", "freeze", "thaw", "reload_model", "reload_optimizer", "lower_rate", "add_group"),
    *("evaluate", "copy", "reset_state", "change_class_weights"),
)


def generate(seed: int) -> Spec:
    """The same model and training for the same seed, on every machine."""
    draw = random.Random(seed)
    nodes: list[Node] = []
    for _ in range(draw.choice((1, 2, 2, 3, 3, 4, 5, 7))):
        nodes.append(_node(draw, nodes))
    return Spec(
        seed,
        tuple(nodes),
        _training(draw),
        batch=draw.randint(3, 6),
        time=draw.randint(2, 5),
        features=draw.choice((4, 4, 6, 8)),
    )


def _node(draw: random.Random, before: list[Node]) -> Node:
    what = draw.random()
    if what < 0.15 and before:
        kind, of = draw.choice(_TWO_INPUTS), (draw.randint(1, 2), draw.randint(1, len(before) + 1))
        return Node(kind, of)
    if what < 0.25 and before:
        like = draw.randint(1, len(before))
        other = before[-like]
        if len(other.of) == 1 and other.kind not in _WRAPPERS:
            return Node(other.kind, options=other.options, inner=other.inner, like=like, frozen=other.frozen)
    if what < 0.42:
        kind = draw.choice(tuple(_WRAPPERS))
        inner = tuple(_single(draw, draw.choice(_INSIDE)) for _ in range(draw.randint(1, 2)))
        return Node(kind, options=_options(draw, _WRAPPERS[kind]), inner=inner)
    name = draw.choice(_OFTEN) if draw.random() < 0.4 else draw.choice(tuple(_OPTIONS))
    if name in _RARE and draw.random() < 0.5:
        name = "linear"
    node = _single(draw, name)
    frozen, unused = draw.random() < 0.08, draw.random() < 0.05
    of = (draw.choice((1, 1, 1, 1, 2)),)
    return Node(node.kind, of, node.options, frozen=frozen, unused=unused)


def _single(draw: random.Random, kind: str) -> Node:
    return Node(kind, options=_options(draw, _OPTIONS[kind]))


def _options(draw: random.Random, choices: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Those drawn that are not the first of their row, which is what a kind takes by itself."""
    drawn = {name: draw.choice(values) for name, values in choices.items()}
    return {name: value for name, value in drawn.items() if name == "lr" or value is not None}


def _training(draw: random.Random) -> Training:
    optimizer = draw.choice((*("SGD", "Adam", "AdamW") * 3, *_OPTIMIZERS))
    steps = draw.choice((3, 3, 4))
    between = tuple(
        sorted((draw.randint(0, steps - 2), draw.choice(_BETWEEN)) for _ in range(draw.choice((0, 0, 0, 1, 1, 2))))
    )
    return Training(
        optimizer,
        _options(draw, _OPTIMIZERS[optimizer]),
        groups=draw.choice((1, 1, 2)),
        left_out=draw.choice((0, 0, 0, 0, 0, 3)),
        steps=steps,
        accumulate=draw.choice((1, 1, 1, 2)),
        clip=draw.choice(("", "", "", "value", "norm")),
        zero=draw.choice(("after", "after", "before")),
        to_none=draw.random() < 0.75,
        schedule=draw.choice(("", "", "", "step", "lambda", "cosine", "exponential", "one_cycle")),
        loss=draw.choice(_LOSSES),
        between=between,
        reads_gradients=draw.random() < 0.25,
        autocast=draw.random() < 0.05,
    )
