"""A window, global tokens and random blocks."""

from attnzoo.attention import PositionKind
from attnzoo.errors import OptionError
from attnzoo.options import whole
from attnzoo.patterns import Global, Local, Pattern, Random
from attnzoo.registry import register
from attnzoo.variants.sparse import Sparse


@register(
    "bigbird",
    examples=({"block": 2, "random_blocks": 1, "num_kv_heads": 2, "seed": 5},),
)
def bigbird(
    d_model: int, num_heads: int, *,
    block: int = 64, window_blocks: int = 3, global_blocks: int = 1, random_blocks: int = 3, seed: int = 0,
    num_kv_heads: int | None = None,
    causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
) -> Sparse:  # fmt: skip
    """BigBird: each block sees its neighbours, the first blocks, and random blocks that differ from head to head.

    Args:
        block: tokens a block.
        window_blocks: blocks in the window, the own one in the middle, so an odd number; causal keeps the half that
            came before.
        global_blocks: blocks at the start that see everything and are seen by everything.
        random_blocks: blocks drawn for each block from those before it that window and global blocks leave; seeing
            is mutual.
        seed: fixes the draws, at every length and in every process.
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
    Source: Zaheer et al. 2020 (BigBird-ITC), section 2 and appendix D, arXiv:2007.14062. There random blocks are
        drawn from the whole sequence and the last block is global too; here nothing depends on what comes later, so
        that a row has about twice `random_blocks` on average where not causal, early ones more.
    Cost: O(t (window_blocks + global_blocks + 2 random_blocks) block e) time, O(t e) memory; in an
        exported program O(t^2 e) and O(h t^2).
    """
    if whole("window_blocks", window_blocks) % 2 == 0:
        raise OptionError(
            f"window_blocks must be odd, the own block in the middle: {window_blocks - 1} or {window_blocks + 1}"
        )
    near = window_blocks // 2
    pattern: Pattern = Local(near, block)
    if whole("global_blocks", global_blocks, least=0):
        pattern = pattern | Global(global_blocks, block)
    if whole("random_blocks", random_blocks, least=0):
        pattern = pattern | Random(random_blocks, block, seed, near=near, first=global_blocks)
    return Sparse(
        d_model, num_heads, pattern=pattern, block=block, num_kv_heads=num_kv_heads,
        causal=causal, dropout=dropout, bias=bias, positions=positions,
    )  # fmt: skip
