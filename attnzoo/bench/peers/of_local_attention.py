"""The package local-attention."""

from local_attention import LocalAttention as Theirs
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.bench.peers.pattern import radius_of
from attnzoo.bench.peers.peer import Peer
from attnzoo.bench.problem import Problem


class LocalAttention(Peer):
    """`LocalAttention` with its exact window, which sees `window_size` tokens to each side, and no rotary positions."""

    modes = ("forward", "both")
    grouped = False

    def prepare(self, attn: Attention, problem: Problem) -> None:
        radius = radius_of(attn, problem, step=1)
        self.kernel = Theirs(radius, causal=attn.causal, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return self.kernel(q, k, v)
