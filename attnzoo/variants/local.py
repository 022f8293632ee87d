"""A sliding window, with global tokens where asked."""

from attnzoo.attention import PositionKind
from attnzoo.options import whole
from attnzoo.patterns import Global, Local, Marked, Pattern
from attnzoo.registry import register
from attnzoo.variants.sparse import Sparse


@register(
    "local", examples=({"radius": 4, "block": 3}, {"radius": 1, "global_tokens": 2, "block": 4, "num_kv_heads": 2})
)
def local(
    d_model: int, num_heads: int, *,
    radius: int = 128, global_tokens: int = 0, block: int = 64, num_kv_heads: int | None = None,
    causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
) -> Sparse:  # fmt: skip
    """Sliding-window attention: a token sees `radius` tokens to each side and itself; the first tokens can be global.

    Args:
        radius: distance in tokens; 0 sees only itself.
        global_tokens: how many tokens at the start see everything and are seen by everything.
        block: tokens a block of the kernel; it changes speed and nothing else.
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
    Source: Beltagy et al. 2020, section 3.1, arXiv:2004.05150; the paper's window w is 2 * radius. Global tokens
        use the same projections as the others, where the paper gives them their own.
    Cost: O(t radius e) time, O(t e) memory; in a compiled or exported graph O(t^2 e) and O(h t^2).
    """
    pattern: Pattern = Local(radius) | Marked(mutual=True)
    if whole("global_tokens", global_tokens, least=0):
        pattern = pattern | Global(global_tokens)
    return Sparse(
        d_model, num_heads, pattern=pattern, block=block, num_kv_heads=num_kv_heads,
        causal=causal, dropout=dropout, bias=bias, positions=positions,
    )  # fmt: skip
