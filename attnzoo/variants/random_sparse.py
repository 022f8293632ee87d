"""Random blocks and nothing else."""

from torch import Tensor

from attnzoo.attention import Attention, PositionKind
from attnzoo.errors import OptionError
from attnzoo.kernels.fastest import fastest
from attnzoo.options import whole
from attnzoo.patterns import Causal, Full, Pattern, Random
from attnzoo.projections import Separate
from attnzoo.registry import register
from attnzoo.scope import Scope

TILE = 64  # tokens a block of the kernel where the drawn blocks are too small for one


@register(
    "random_sparse",
    examples=(
        {"keys": 4, "block": 2},
        {"ratio": 0.3, "seed": 3, "num_kv_heads": 2, "redraw": True},
        {"keys": 2, "train_only": True},
    ),
)
class RandomSparse(Attention):
    """Random sparse attention: each block sees itself and blocks drawn at random from those before it; seeing is
    mutual.

    Args:
        keys: keys drawn for each query, a multiple of block.
        block: tokens a block.
        ratio: the share of the blocks before it that a block draws, in place of keys.
        seed: fixes the draws, at every length and in every process.
        redraw: draws anew at each training step, from torch's generator, as dropout does, or from `salt` where that is
            set; eval keeps to the seed.
        train_only: sparse in training, and everything may look at everything in eval.
        num_kv_heads: key-value heads, each shared by a group of query heads; as many as query heads where left out.
    Source: the random part of Zaheer et al. 2020, section 2, arXiv:2007.14062; `train_only` is how tutorials read
        it.
    Cost: O(t keys e) time in blocks of 8 tokens and more, O(t^2 e) below, as nearly every tile of keys is touched;
        O(t e) memory; in an exported program O(t^2 e) and O(h t^2).
    """

    def __init__(
        self, d_model: int, num_heads: int, *,
        keys: int = 64, block: int = 1, ratio: float | None = None, seed: int = 0, redraw: bool = False,
        train_only: bool = False, num_kv_heads: int | None = None,
        causal: bool = False, dropout: float = 0.0, bias: bool = True, positions: PositionKind = "none",
    ) -> None:  # fmt: skip
        if ratio is not None and not 0 < ratio <= 1:
            raise OptionError(f"ratio must be a number in (0, 1], not {ratio!r}")
        if ratio is None and whole("keys", keys) % whole("block", block):
            raise OptionError(f"keys = {keys} must be a multiple of block = {block}")
        drawn = Random(None if ratio is not None else keys // block, block, seed, share=ratio)
        projection = Separate(d_model, num_heads, num_kv_heads, bias)
        super().__init__(projection, drawn, causal=causal, dropout=dropout, positions=positions)
        self.redraw, self.train_only = redraw, train_only
        self.everything: Pattern = Causal() if causal else Full()
        self.block = block if block >= 8 else TILE

    @property
    def redraws(self) -> bool:
        return self.redraw and self.training

    def current_pattern(self) -> Pattern:
        return self.everything if self.train_only and not self.training else self.pattern

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return fastest(q, k, v, scope, self.block)
