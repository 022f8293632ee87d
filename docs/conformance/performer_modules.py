"""performer-pytorch, under the contract."""

import torch
from performer_pytorch import SelfAttention
from torch import nn

LIBRARY = "performer-pytorch"
TINY = 1e-4  # what it adds to each feature


class Performer(nn.Module):
    """performer_pytorch.SelfAttention with 16 random features."""

    asked = "`nb_features=16`, `mask` for key_mask; right is its own features, summed over the keys that may be seen"
    without = frozenset({"causal"})

    def __init__(self, d_model, num_heads, *, dropout=0.0):
        super().__init__()
        width = d_model // num_heads
        self.inner = SelfAttention(d_model, heads=num_heads, dim_head=width, nb_features=16, dropout=dropout)

    def forward(self, x, *, key_mask=None):
        return self.inner(x, mask=key_mask)

    def expected(self, x, *, key_mask=None):
        """Features of queries and keys from its own random matrix; every sum is over the visible keys."""
        inner = self.inner
        seen = torch.ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask != 0
        layers = inner.to_q, inner.to_k, inner.to_v
        q, k, v = (layer(x).unflatten(-1, (inner.heads, -1)).transpose(1, 2) for layer in layers)
        q, k = self.features(q, (-1,)), self.features(k, (-1, -2), seen[:, None, :, None])
        weights = (q @ k.transpose(-1, -2)).masked_fill(~seen[:, None, None, :], 0)
        total = weights.sum(-1, keepdim=True)
        heads = weights / total.where(total > 0, 1) @ v
        return inner.to_out(heads.transpose(1, 2).flatten(2))

    def features(self, heads, axes, seen=None):
        matrix = self.inner.fast_attention.projection_matrix.to(heads.dtype)
        heads = heads * heads.shape[-1] ** -0.25
        dash = heads @ matrix.T
        shown = dash if seen is None else dash.masked_fill(~seen, torch.finfo(dash.dtype).min)
        highest = shown.amax(axes, keepdim=True).detach()
        return torch.exp(dash - heads.square().sum(-1, keepdim=True) / 2 - highest) + TINY


MODULES = (Performer,)
