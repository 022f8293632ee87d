"""Multi-head attention as a textbook writes it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.patterns import Full
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope


@register("vanilla", examples=({},))
class Vanilla(Attention):
    """Multi-head attention, written out step by step.

    Args:
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Vaswani et al. 2017, section 3.2, arXiv:1706.03762; with biases, as torch.nn.MultiheadAttention has
        them.
    Cost: O(t^2 e) time, O(h t^2) memory.
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        projection = Separate(d_model, num_heads, bias=bias)
        super().__init__(projection, Full(), causal=causal, dropout=dropout, positions=positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)  # half precision would overflow here
        scores = q.to(wide) @ k.to(wide).transpose(-2, -1) / math.sqrt(self.head_dim)
        if scope.score is not None:
            scores = scope.score(scores, scope.query, scope.key)
        hidden = ~scope.visible()
        scores = scores.masked_fill(hidden, torch.finfo(wide).min)
        weights = scores.softmax(dim=-1).masked_fill(hidden, 0)  # a query that sees nothing gets zero, not the mean
        weights = F.dropout(weights, scope.dropout)
        return (weights @ v.to(wide)).to(v.dtype)
