"""Multi-head attention in named axes."""

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.dense import masked_softmax
from attnzoo.patterns import Full
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope


@register("einsum", examples=({},))
class Einsum(Attention):
    """Multi-head attention with every axis named.

    Args:
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Vaswani et al. 2017, section 3.2, arXiv:1706.03762.
    Cost: O(t^2 e) time, O(h t^2) memory.
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        projection = Separate(d_model, num_heads, bias=bias)
        super().__init__(projection, Full(), causal=causal, dropout=dropout, positions=positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = einsum(q.to(wide), k.to(wide), "b h q d, b h k d -> b h q k") * self.head_dim**-0.5
        if scope.score is not None:
            scores = scope.score(scores, scope.query, scope.key)
        weights = F.dropout(masked_softmax(scores, scope.visible()), scope.dropout)
        return einsum(weights, v.to(wide), "b h q k, b h k f -> b h q f").to(v.dtype)
