"""Multi-query attention."""

from attnzoo.attention import PositionKind
from attnzoo.registry import register
from attnzoo.variants.gqa import GQA


@register("mqa", examples=({},))
def mqa(
    d_model: int, num_heads: int, *,
    causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
) -> GQA:  # fmt: skip
    """Multi-query attention: all query heads share one key-value head.

    Source: Shazeer 2019, section 3, arXiv:1911.02150.
    Cost: O(t^2 e) time, O(t e) memory; a cache of 2 * head_dim numbers a token.
    """
    return GQA(d_model, num_heads, num_kv_heads=1, causal=causal, dropout=dropout, bias=bias, positions=positions)
