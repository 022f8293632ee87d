"""Attention for decoding token by token."""

from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.errors import OptionError
from attnzoo.kernels.fastest import fastest
from attnzoo.patterns import Causal
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope


@register("kv_cached", examples=({}, {"num_kv_heads": 2}))
class KVCached(Attention):
    """Causal attention made for decoding: `new_cache` keeps keys and values, and one query at a time reads them as
    they are stored.

    Args:
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
        causal: True and nothing else.
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Shazeer 2019, section 2.3 (incremental inference), arXiv:1911.02150.
    Cost: O(t e) time a token with a cache, O(t^2 e) without.
    """

    without = frozenset({"bidirectional"})

    def __init__(
        self, d_model: int, num_heads: int, *,
        num_kv_heads: int | None = None,
        causal: bool = True, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        if not causal:
            raise OptionError("kv_cached is causal only: leave out causal=False, or use gqa")
        projection = Separate(d_model, num_heads, num_kv_heads, bias)
        super().__init__(projection, Causal(), dropout=dropout, positions=positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return fastest(q, k, v, scope)
