"""Networks that transformers describes by a configuration, built from it with random weights; nothing is downloaded.

transformers is imported inside the builders only, so that the other networks work without it. Each result is wrapped to
take one tensor and return its logits. `LogitsOf.model` is the transformers model.

Legend: B batch, C channels, H and W image height and width, T tokens, N classes, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from retime.recipes.models.common import choose, scaled


class Size(NamedTuple):
    """One size of a language model: layers, hidden size, attention heads, feed-forward size, key-value heads."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    key_value_heads: int


# Turc et al. 2019 (the small ones) and Devlin et al. 2019 (base, large).
BERT_SIZES = {
    "tiny": Size(2, 128, 2, 512, 2),
    "mini": Size(4, 256, 4, 1024, 4),
    "small": Size(4, 512, 8, 2048, 8),
    "medium": Size(8, 512, 8, 2048, 8),
    "base": Size(12, 768, 12, 3072, 12),
    "large": Size(24, 1024, 16, 4096, 16),
}
# Radford et al. 2019; "medium" has the shape of GPT-3 medium (Brown et al. 2020). "tiny" is ours, for quick runs.
GPT2_SIZES = {
    "tiny": Size(2, 128, 2, 512, 2),
    "small": Size(12, 768, 12, 3072, 12),
    "medium": Size(24, 1024, 16, 4096, 16),
    "large": Size(36, 1280, 20, 5120, 20),
}
# "1b" is TinyLlama (Zhang et al. 2024), "7b" Llama (Touvron et al. 2023); "tiny" and "small" are ours.
LLAMA_SIZES = {
    "tiny": Size(2, 128, 4, 352, 2),
    "small": Size(12, 768, 12, 2048, 12),
    "1b": Size(22, 2048, 32, 5632, 4),
    "7b": Size(32, 4096, 32, 11008, 32),
}
# Blocks a stage and whether they are bottlenecks (He et al. 2016, table 1).
RESNETS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class LogitsOf(nn.Module):
    """A transformers model with a head, as a module from one tensor to one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Pixels or token ids, as `model` takes them first, to the head's logits."""
        logits: Tensor = self.model(inputs, return_dict=True).logits
        return logits


def require_transformers() -> Any:
    """The transformers package; ImportError, which says what to install, without it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "this network is built by transformers: pip install 'lightning-retime[recipes]', "
            "or take one of retime.recipes.models that needs torch alone (vgg, densenet, mobilenet_v3, mlp ...)"
        ) from error
    return transformers


def sized(sizes: dict[str, Size], size: str, layers: int | None) -> Size:
    """``sizes[size]`` with the number of layers replaced if one is given, after a check of both."""
    choose("size", size, sizes)
    if layers is not None and layers < 1:
        raise ValueError(f"layers={layers} must be at least 1")
    return sizes[size] if layers is None else sizes[size]._replace(layers=layers)


def mobilenet_v2(
    num_classes: int = 1000, width: float = 1.0, image_size: int = 224, in_channels: int = 3, dropout: float = 0.2
) -> LogitsOf:
    """MobileNetV2 (Sandler et al. 2018), the optimizer-fusion paper's main network.

    Input ``(B, in_channels, H, W)`` with H and W at least 32, output ``(B, N)``. ``image_size`` is only recorded in the
    configuration: the network pools globally, so any size runs. ``width`` is the width multiplier.
    """
    transformers = require_transformers()
    config = transformers.MobileNetV2Config(
        num_labels=num_classes,
        num_channels=in_channels,
        depth_multiplier=width,
        image_size=image_size,
        classifier_dropout_prob=dropout,
        tf_padding=False,  # symmetric padding inside the convolutions: no extra padding kernel before each one
    )
    model = transformers.MobileNetV2ForImageClassification(config)
    for module in model.modules():
        # transformers hands TensorFlow's decay 0.997 to torch as momentum, where it means "keep 0.3 % of the past":
        # evaluation would then run on the last batch's statistics.
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return LogitsOf(model)


def resnet(depth: int = 50, num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> LogitsOf:
    """ResNet-18, -34, -50, -101 or -152 (He et al. 2016), with the stride in the 3x3 convolution of a bottleneck.

    Input ``(B, in_channels, H, W)`` with H and W at least 32, output ``(B, N)``. ``width`` multiplies all channels.

    Raises:
        ValueError: unknown ``depth``.
    """
    choose("depth", depth, RESNETS)
    stages, bottleneck = RESNETS[depth]
    transformers = require_transformers()
    stem = scaled(64, width)
    outputs = [stem * (4 if bottleneck else 1) * 2**stage for stage in range(4)]
    config = transformers.ResNetConfig(
        num_labels=num_classes,
        num_channels=in_channels,
        embedding_size=stem,
        hidden_sizes=outputs,
        depths=list(stages),
        layer_type="bottleneck" if bottleneck else "basic",
    )
    return LogitsOf(transformers.ResNetForImageClassification(config))


def bert(
    size: str = "base",
    layers: int | None = None,
    head: str = "classification",
    num_classes: int = 2,
    vocab_size: int = 30522,
    max_tokens: int = 512,
    dropout: float = 0.1,
) -> LogitsOf:
    """BERT (Devlin et al. 2019). BERT-12, -24 and -48 of ooo-backprop are ``layers=12``, ``24`` and ``48``.

    Input token ids ``(B, T)``, T at most ``max_tokens``; output ``(B, N)`` with ``head="classification"`` (N is
    ``num_classes``), or ``(B, T, V)`` with ``head="masked_lm"``. No attention mask: all T tokens are real. Id 0 is the
    padding token, whose embedding gets no gradient.

    Raises:
        ValueError: unknown ``size`` or ``head``.
    """
    shape = sized(BERT_SIZES, size, layers)
    choose("head", head, ("classification", "masked_lm"))
    transformers = require_transformers()
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=max_tokens,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=num_classes,
        use_cache=False,
    )
    if head == "classification":
        return LogitsOf(transformers.BertForSequenceClassification(config))
    return LogitsOf(transformers.BertForMaskedLM(config))


def gpt2(
    size: str = "small",
    layers: int | None = None,
    vocab_size: int = 50257,
    max_tokens: int = 1024,
    dropout: float = 0.1,
    tied: bool = True,
    linear: bool = False,
) -> LogitsOf:
    """GPT-2 (Radford et al. 2019). ``size="medium"`` has the shape of GPT-3 medium, which ooo-backprop trains.

    Input token ids ``(B, T)``, T at most ``max_tokens``; output next-token logits ``(B, T, V)``. ``tied`` shares the
    token embedding with the output layer. ``linear`` takes ``nn.Linear`` where transformers has layers of its own with
    transposed weights, ``Conv1D``.

    Raises:
        ValueError: unknown ``size``.
    """
    shape = sized(GPT2_SIZES, size, layers)
    transformers = require_transformers()
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=max_tokens,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.feed_forward,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=vocab_size - 1,
        eos_token_id=vocab_size - 1,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    for name, module in [*model.named_modules()] if linear else []:
        if isinstance(module, transformers.pytorch_utils.Conv1D):
            layer = nn.Linear(*module.weight.shape)
            layer.load_state_dict({"weight": module.weight.t(), "bias": module.bias})
            model.set_submodule(name, layer)
    return LogitsOf(model)


def llama(
    size: str = "small", layers: int | None = None, vocab_size: int = 32000, max_tokens: int = 2048, tied: bool = False
) -> LogitsOf:
    """Llama (Touvron et al. 2023): rotary positions, RMSNorm, gated feed-forward; no dropout.

    Input token ids ``(B, T)``, T at most ``max_tokens``; output next-token logits ``(B, T, V)``.

    Raises:
        ValueError: unknown ``size``.
    """
    shape = sized(LLAMA_SIZES, size, layers)
    transformers = require_transformers()
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LogitsOf(transformers.LlamaForCausalLM(config))
