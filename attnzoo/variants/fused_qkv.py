"""Multi-head attention with one layer for queries, keys and values."""

from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.fastest import fastest
from attnzoo.patterns import Full
from attnzoo.projections import Fused
from attnzoo.registry import register
from attnzoo.scope import Scope


@register("fused_qkv", examples=({}, {"num_kv_heads": 2}))
class FusedQKV(Attention):
    """Multi-head attention with one matrix for queries, keys and values, and torch's fused kernel.

    Args:
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Vaswani et al. 2017, section 3.2, arXiv:1706.03762; one matrix as in GPT-2, rows of all queries, all
        keys, all values.
    Cost: O(t^2 e) time, O(t e) memory.
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        num_kv_heads: int | None = None,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        projection = Fused(d_model, num_heads, num_kv_heads, bias)
        super().__init__(projection, Full(), causal=causal, dropout=dropout, positions=positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return fastest(q, k, v, scope)
