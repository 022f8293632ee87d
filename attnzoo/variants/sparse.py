"""Attention over any pattern you write."""

from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.formulas import parse
from attnzoo.kernels.fastest import fastest
from attnzoo.options import whole
from attnzoo.patterns import Pattern
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope


@register(
    "sparse",
    examples=(
        {"pattern": "Local(2) | Global(1)", "block": 4},
        {"pattern": "Heads(0) | Local(1)", "block": 3, "num_kv_heads": 2},
        {"pattern": "Full()", "block": 4},
    ),
)
class Sparse(Attention):
    """Attention over any pattern, such as `Local(128) | Global(4)`, computed in blocks.

    Args:
        pattern: a pattern, or its formula as text.
        block: tokens a block of the kernel; it changes speed and nothing else.
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores.
    Source: Child et al. 2019, section 4, arXiv:1904.10509, for sparse patterns at large; theirs are other ones.
    Cost: O(p e) time for p pairs in the blocks that the pattern touches, O(t e) memory; in an
        exported program O(t^2 e) and O(h t^2).
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        pattern: Pattern | str, block: int = 64, num_kv_heads: int | None = None,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        projection = Separate(d_model, num_heads, num_kv_heads, bias)
        pattern = parse(pattern) if isinstance(pattern, str) else pattern
        super().__init__(projection, pattern, causal=causal, dropout=dropout, positions=positions)
        self.block = whole("block", block)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return fastest(q, k, v, scope, self.block)
