"""Transformer (base), the encoder-decoder of Vaswani et al. 2017, on ``torch.nn.Transformer``'s layers.

Legend: B batch, S source tokens, T target tokens, D model size, V vocabulary size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sinusoids(length: int, features: int) -> Tensor:
    """Position codes ``(length, features)``: sines in the even columns, cosines in the odd ones (section 3.5)."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    angle = position * torch.exp(torch.arange(0, features, 2) * (-math.log(10000.0) / features))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, features)


class TranslationTransformer(nn.Module):
    """Encoder-decoder with one matrix for source embedding, target embedding and output layer (section 3.4)."""

    positions: Tensor

    def __init__(
        self, vocab_size: int, features: int, heads: int, layers: int, dropout: float, max_tokens: int
    ) -> None:
        super().__init__()
        self.features = features
        self.embedding = nn.Embedding(vocab_size, features)
        self.register_buffer("positions", sinusoids(max_tokens, features), persistent=False)
        self.dropout = nn.Dropout(dropout)
        # Built by hand: nn.Transformer appends a last LayerNorm to both stacks, which the paper's post-norm layers
        # (a norm after every sub-layer, the last one included) do not have.
        encoder_layer = nn.TransformerEncoderLayer(features, heads, 4 * features, dropout, batch_first=True)
        decoder_layer = nn.TransformerDecoderLayer(features, heads, 4 * features, dropout, batch_first=True)
        self.transformer = nn.Transformer(
            d_model=features,
            nhead=heads,
            custom_encoder=nn.TransformerEncoder(encoder_layer, layers, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, layers),
            batch_first=True,
        )
        # The same matrix embeds (scaled by sqrt(D)) and scores, so its entries start at 1/sqrt(D).
        nn.init.normal_(self.embedding.weight, std=features**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``(B, T)`` to embeddings with positions ``(B, T, D)``."""
        if tokens.shape[1] > len(self.positions):
            raise ValueError(f"{tokens.shape[1]} tokens exceed max_tokens={len(self.positions)}: build with more")
        embedded = self.embedding(tokens) * math.sqrt(self.features) + self.positions[: tokens.shape[1]]
        dropped: Tensor = self.dropout(embedded)
        return dropped

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Next-token logits ``(B, T, V)`` for target tokens ``(B, T)``, given source tokens ``(B, S)``.

        One tensor ``(B, 2, T)`` in place of two carries a source and a target of equal length, so that recipes can
        treat translation like every other task. Targets are the decoder's inputs: already shifted right.

        Raises:
            ValueError: no target and no pair in ``source``, or more tokens than ``max_tokens``.
        """
        if target is None:
            if source.dim() != 3 or source.shape[1] != 2:
                raise ValueError(
                    f"tokens of shape {tuple(source.shape)}: pass (source, target), or one tensor of shape (B, 2, T)"
                )
            source, target = source.unbind(dim=1)
        # A boolean mask, True above the diagonal: position t sees targets up to t.
        size = target.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=target.device).triu(1)
        decoded = self.transformer(self.embed(source), self.embed(target), tgt_mask=causal, tgt_is_causal=True)
        return nn.functional.linear(decoded, self.embedding.weight)


def transformer_base(
    vocab_size: int = 37000,
    width: float = 1.0,
    layers: int = 6,
    heads: int = 8,
    dropout: float = 0.1,
    max_tokens: int = 1024,
) -> TranslationTransformer:
    """Transformer (base): 6 + 6 layers, D 512, feed-forward 2048, 8 heads (Vaswani et al. 2017, table 3).

    The optimizer-fusion paper trains it on WMT English-German (appendix C.4), whose shared vocabulary has about 37000
    entries. Input one int64 tensor ``(B, 2, T)`` of source and right-shifted target, or two tensors ``(B, S)`` and
    ``(B, T)``; output logits ``(B, T, V)``. ``width`` multiplies D and the feed-forward size.

    Raises:
        ValueError: ``width`` gives a D that ``heads`` does not divide.
    """
    features = int(512 * width)
    if features < heads or features % (2 * heads):
        raise ValueError(f"width={width} makes D={features}, which {heads} heads of even size do not divide")
    return TranslationTransformer(vocab_size, features, heads, layers, dropout, max_tokens)
