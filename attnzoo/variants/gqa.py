"""Grouped-query attention."""

from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.fastest import fastest
from attnzoo.patterns import Full
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope


@register("gqa", examples=({"num_kv_heads": 2},))
class GQA(Attention):
    """Grouped-query attention: groups of query heads share a key-value head, which shrinks the cache by their size.

    Args:
        num_kv_heads: key-value heads; it divides num_heads. Query head i reads key-value head i // (num_heads /
            num_kv_heads).
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Ainslie et al. 2023, section 2.2, arXiv:2305.13245; trained from scratch, not up-trained from more
        heads.
    Cost: O(t^2 e) time, O(t e) memory; a cache of 2 * num_kv_heads * head_dim numbers a token.
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        num_kv_heads: int,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        projection = Separate(d_model, num_heads, num_kv_heads, bias)
        super().__init__(projection, Full(), causal=causal, dropout=dropout, positions=positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return fastest(q, k, v, scope)
