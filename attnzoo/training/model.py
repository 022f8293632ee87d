"""A pre-norm transformer, encoder or decoder, around any attention variant."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo import registry
from attnzoo.attention import Attention
from attnzoo.cache import Cache
from attnzoo.errors import InputError, NotSupportedError, OptionError
from attnzoo.options import choice, options, share, whole
from attnzoo.positions import count_visible
from attnzoo.scope import check_key_mask

Positions = Literal["learned", "rotary", "alibi", "none"]
Checkpointing = bool | Literal["attention"]


class Transformer(nn.Module):
    """Reads token ids and gives one row of logits: from the first token, or from every token.

    Args:
        vocabulary: how many token ids there are.
        length: the longest sequence; only learned positions have a limit.
        classes: logits in a row.
        causal: a decoder, in which a token sees itself and what came before.
        pooling: "first" answers from the first token, "every" from each.
        attention: the variant's name and options. An option named `seed` is raised by the layer's index, so that layers
            draw different patterns.
        dropout: on the embedding, the branches and inside the feed-forward; the attention has its own for its weights.
        positions: "learned" adds an embedding of the position, "rotary" and "alibi" are up to the attention.
        gradient_checkpointing: recompute each layer in the backward pass instead of keeping what it computed;
            "attention" recomputes its attention alone, and keeps what the feed-forward computed.
    Raises:
        OptionError: an option is impossible, or the attention refuses its own.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        classes: int,
        causal: bool,
        pooling: Literal["first", "every"],
        attention: Mapping[str, Any],
        d_model: int = 64,
        layers: int = 2,
        feed_forward: int = 256,
        dropout: float = 0.0,
        positions: Positions = "learned",
        gradient_checkpointing: Checkpointing = False,
    ) -> None:
        super().__init__()
        whole("layers", layers)
        whole("feed_forward", feed_forward)
        share("dropout", dropout)
        choice("positions", positions, ("learned", "rotary", "alibi", "none"))
        if not isinstance(gradient_checkpointing, bool) and gradient_checkpointing != "attention":
            raise OptionError(
                f"gradient_checkpointing must be true, false or 'attention', not {gradient_checkpointing!r}"
            )
        self.length = length
        self.pooling = pooling
        self.gradient_checkpointing = gradient_checkpointing
        self.token_embedding = nn.Embedding(vocabulary, whole("d_model", d_model))
        self.position_embedding = nn.Embedding(length, d_model) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        build = functools.partial(
            registry.build,
            d_model=d_model,
            causal=causal,
            positions=positions if positions in ("rotary", "alibi") else "none",
        )
        self.layers = nn.ModuleList(
            Layer(build(**attention_options(attention, layer)), d_model, feed_forward, dropout)
            for layer in range(layers)
        )
        self.final_norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, classes)
        # Small, so that the layers are heard, but not so small that words of one role grow into one; positions from
        # nothing, so that words are read before their places.
        nn.init.normal_(self.token_embedding.weight, std=0.1)
        if self.position_embedding is not None:
            nn.init.zeros_(self.position_embedding.weight)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def supports(self, feature: str) -> bool:
        """Whether the attention of every layer supports a feature, such as "cache"."""
        return all(feature in attention.supports for attention in self.attentions)

    def new_caches(self, batch_size: int, max_length: int) -> list[Cache]:
        """An empty cache for each layer.

        Raises:
            NotSupportedError: the model answers from the first token, or its attention can't decode.
        """
        if self.pooling == "first":
            raise NotSupportedError("a model that answers from the first token has no next token to decode")
        return [attention.new_cache(batch_size, max_length) for attention in self.attentions]

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, caches: Sequence[Cache] | None = None) -> Tensor:
        """Gives logits [b, classes] or [b, t, classes] for token ids [b, t].

        Args:
            key_mask: [b, length + t], True = a real token; with caches it goes back to their first token, in every
                call. Hidden tokens take no learned position.
            caches: what each layer read before, from `new_caches`; nothing is checkpointed then.
        """
        before = caches[0].length if caches else 0
        length = before + tokens.shape[1]
        key_mask = check_key_mask(key_mask, len(tokens), length)
        hidden = self.token_embedding(tokens)
        if self.position_embedding is not None:
            if length > self.length:
                raise InputError(f"{length} tokens in a sequence, but positions are learned for {self.length}")
            hidden = hidden + self.position_embedding(count_visible(length, key_mask, None, tokens.device)[:, before:])
        hidden = self.dropout(hidden)
        each: Sequence[Cache | None] = caches or [None] * len(self.layers)
        again = self.gradient_checkpointing if torch.is_grad_enabled() and not caches else False
        for layer, cache in zip(self.layers, each, strict=True):
            if again is True:
                hidden = checkpoint(layer, hidden, key_mask, use_reentrant=False)
            else:
                hidden = layer(hidden, key_mask, cache, attention_again=again == "attention")
        if self.pooling == "first":
            hidden = hidden[:, 0]
        return self.head(self.final_norm(hidden))


class Layer(nn.Module):
    """Attention, then a feed-forward network, each normalised first and added to what came in."""

    def __init__(self, attention: nn.Module, d_model: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = attention
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.widen = nn.Linear(d_model, feed_forward)
        self.activation = nn.GELU()
        self.narrow = nn.Linear(feed_forward, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | None = None,
        *,
        attention_again: bool = False,
    ) -> Tensor:
        """Tokens [b, t, e] to tokens [b, t, e].

        Args:
            attention_again: compute the attention once more in the backward pass, instead of keeping what it needs.
        """
        if attention_again:
            attended = checkpoint(self.attend, hidden, key_mask, use_reentrant=False)
        else:
            attended = self.attend(hidden, key_mask, cache)
        hidden = hidden + self.dropout(attended)
        inner = self.dropout(self.activation(self.widen(self.feed_forward_norm(hidden))))
        return hidden + self.dropout(self.narrow(inner))

    def attend(self, hidden: Tensor, key_mask: Tensor | None, cache: Cache | None = None) -> Tensor:
        """What the attention adds to its input."""
        return self.attention(self.attention_norm(hidden), key_mask=key_mask, cache=cache)


def attention_options(attention: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """One layer's attention: the recipe's options, with the layer's index added to a seed."""
    known = options(registry.find(attention["name"]))
    if "seed" not in known:
        return dict(attention)
    seed = attention.get("seed", known["seed"].default)
    return {**attention, "seed": seed + layer} if isinstance(seed, int) else dict(attention)
