"""The package x-transformers."""

from torch import Tensor
from x_transformers.attend import Attend as Theirs

from attnzoo.attention import Attention
from attnzoo.bench.peers.pattern import mask_of
from attnzoo.bench.peers.peer import Peer, Unfit
from attnzoo.bench.problem import Problem
from attnzoo.patterns import Causal, Full


class Attend(Peer):
    """`Attend` with `flash=True`, which is torch's fused attention behind its own mask handling."""

    def prepare(self, attn: Attention, problem: Problem) -> None:
        if 1 < attn.num_kv_heads < attn.num_heads:
            raise Unfit("deals query heads out to key-value heads in another order")
        pattern = attn.current_pattern()
        self.kernel = Theirs(heads=attn.num_heads, causal=pattern == Causal(), flash=True)
        self.mask = None
        if pattern not in (Full(), Causal()):
            self.mask = mask_of(attn, problem)[None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return self.kernel(q, k, v, mask=self.mask)[0]
