"""A sliding window, with global tokens where asked."""

import dataclasses

import torch
from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.fastest import fastest
from attnzoo.options import whole
from attnzoo.patterns import Causal, Global, Local, Marked, Past, Pattern
from attnzoo.projections import WithGlobal
from attnzoo.registry import register
from attnzoo.scope import Scope
from attnzoo.shapes import Place, Span
from attnzoo.variants.sparse import Sparse


@register(
    "local",
    examples=(
        {"radius": 4, "block": 3},
        {"radius": 1, "global_tokens": 2, "block": 4, "num_kv_heads": 2, "global_projections": True},
    ),
)
def local(
    d_model: int, num_heads: int, *,
    radius: int = 128, global_tokens: int = 0, global_projections: bool = False,
    block: int = 64, num_kv_heads: int | None = None,
    causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
) -> Attention:  # fmt: skip
    """Sliding-window attention: a token sees `radius` tokens to each side and itself; the first tokens can be global.

    Args:
        radius: distance in tokens; 0 sees only itself.
        global_tokens: how many tokens at the start see everything and are seen by everything.
        global_projections: gives global tokens a second set of layers to look with: queries, and keys and values of
            all that they look at. Others look at them as at each other.
        block: tokens a block of the kernel; it changes speed and nothing else.
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
    Source: Beltagy et al. 2020, section 3.1, arXiv:2004.05150; the paper's window w is 2 * radius. The second set
        is its "Linear Projections for Global Attention", which there starts as a copy of the first and here does not.
    Cost: O(t radius e) time, O(t e) memory; in an exported program O(t^2 e) and O(h t^2),
        and with global_projections in a compiled one too.
    """
    pattern: Pattern = Local(radius) | Marked(mutual=True)
    if whole("global_tokens", global_tokens, least=0):
        pattern = pattern | Global(global_tokens)
    if global_projections:
        projection = WithGlobal(d_model, num_heads, num_kv_heads, bias)
        return TwoSets(
            projection, pattern, radius=radius, global_tokens=global_tokens, block=block,
            causal=causal, dropout=dropout, positions=positions,
        )  # fmt: skip
    return Sparse(
        d_model, num_heads, pattern=pattern, block=block, num_kv_heads=num_kv_heads,
        causal=causal, dropout=dropout, bias=bias, positions=positions,
    )  # fmt: skip


class TwoSets(Attention):
    """A window whose global tokens have projections of their own: two attentions, of which each row takes one."""

    def __init__(
        self, projection: WithGlobal, pattern: Pattern, *, radius: int, global_tokens: int, block: int,
        causal: bool, dropout: float, positions: PositionKind,
    ) -> None:  # fmt: skip
        super().__init__(projection, pattern, causal=causal, dropout=dropout, positions=positions)
        self.global_tokens, self.block = global_tokens, whole("block", block)
        near: Pattern = Local(radius) | OneWay(global_tokens)
        far: Pattern = OneWay(global_tokens, looking=True)
        self.near, self.far = (near & Causal(), far & Causal()) if causal else (near, far)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        (q, q_far), (k, k_far), (v, v_far) = (x.chunk(2, dim=-1) for x in (q, k, v))
        near = fastest(q, k, v, dataclasses.replace(scope, pattern=self.near, formula=""), self.block)
        far = fastest(q_far, k_far, v_far, dataclasses.replace(scope, pattern=self.far, formula=""), self.block)
        return torch.where(self._is_global(scope), far, near)

    def weights_for(self, q: Tensor, k: Tensor, scope: Scope) -> Tensor:
        sets = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        near, far = (super(TwoSets, self).weights_for(*two, scope) for two in sets)
        return torch.where(self._is_global(scope), far, near)

    def expected(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        near, far = super().expected(q, k, v, scope).chunk(2, dim=-1)  # the row's weights over values of both sets
        return torch.where(self._is_global(scope), far, near)

    def _is_global(self, scope: Scope) -> Tensor:
        """Which queries are global, [1, q, 1] or [b, 1, q, 1]."""
        first, marked = scope.query.index < self.global_tokens, scope.query.marked
        return first if marked is None else first | marked


@dataclasses.dataclass(frozen=True, repr=False)
class OneWay(Global):
    """The first `tokens` tokens and all marked ones are seen by everything or, where `looking`, see everything."""

    looking: bool = False

    @property
    def past(self) -> Past:  # type: ignore[override]
        return Past() if self.looking else super().past

    def sees(self, query: Place, key: Place) -> Tensor:
        place = query if self.looking else key
        first = place.index < self.tokens
        return first if place.marked is None else first | place.marked

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        span = queries if self.looking else keys
        first = span.first < self.tokens
        return first if span.marked is None else first | span.marked

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        span = queries if self.looking else keys
        return span.last < self.tokens
