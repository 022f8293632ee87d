"""Variants with nothing wrong: what the broken ones start from."""

import torch
import torch.nn.functional as F

from attnzoo.attention import Attention, PositionKind
from attnzoo.kernels.dense import dense_weights
from attnzoo.patterns import Full, Local, Marked, Random
from attnzoo.projections import Separate


class Sound(Attention):
    """Nothing wrong with it: what the broken ones start from."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: PositionKind = "none",
    ) -> None:
        projection = Separate(d_model, num_heads, num_kv_heads, bias)
        super().__init__(projection, self.sees(), causal=causal, dropout=dropout, positions=positions)
        self.calls = 0
        self.prepare()

    def sees(self):
        return Full()

    def prepare(self):
        """What a broken one adds to itself."""


class Drawn(Sound):
    """Random keys for each query."""

    def sees(self):
        return Random(2)


class Redrawn(Drawn):
    """Random keys, drawn anew in training."""

    examples = ({"redraw": True},)

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        redraw: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        positions: PositionKind = "none",
    ) -> None:
        super().__init__(d_model, num_heads, causal=causal, dropout=dropout, bias=bias, positions=positions)
        self.redraw = redraw

    @property
    def redraws(self):
        return self.redraw and self.training


class TopKeys(Sound):
    """Sound, and what it sees depends on content: for each query the three keys of the highest scores."""

    without = frozenset({"export"})  # how many keys there are to choose from depends on the length

    def visible_for(self, q, k, scope):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = (q.double() @ k.double().mT).masked_fill(~scope.visible(), -torch.inf)
        best = scores.topk(min(3, scores.shape[-1]), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & scope.visible()

    def attend(self, q, k, v, scope):
        weights = F.dropout(dense_weights(q, k, scope, self.visible_for(q, k, scope)), scope.dropout)
        return (weights @ v.to(weights.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)).to(v.dtype)


class Linear(Sound):
    """Sound, with mathematics of its own: weights in proportion to phi(q) @ phi(k), phi(x) = elu(x) + 1."""

    def attend(self, q, k, v, scope):
        wide = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[1] // k.shape[1]
        q = q.to(wide)
        k, v = (x.to(wide)[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).masked_fill(~scope.visible(), 0)
        weights = weights * self.decay(weights, scope)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        return (F.dropout(weights, scope.dropout) @ v).to(self.q_proj.weight.dtype)

    def expected(self, q, k, v, scope):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        powers = torch.einsum("bhqd,bhkd->bhqk", torch.where(q > 0, q + 1, q.exp()), torch.where(k > 0, k + 1, k.exp()))
        powers = powers * scope.visible() * self.decay(powers, scope)
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total == 0, 1, total) @ v

    def decay(self, weights, scope):
        """What a term of the scores does to weights that have no logarithm."""
        return 1 if scope.score is None else scope.score(torch.zeros_like(weights), scope.query, scope.key).exp()


class Marking(Sound):
    """A window, and marked tokens that see everything and are seen by everything, computed densely."""

    def sees(self):
        return Local(2) | Marked(mutual=True)
