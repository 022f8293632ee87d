"""timm, under the contract."""

import torch
from timm.layers import Attention
from torch import nn

LIBRARY = "timm"


class Fused(nn.Module):
    """timm.layers.Attention, by torch's fused attention."""

    asked = "one bool `attn_mask` of all masks; `is_causal=True` where there are none"
    fused = True

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0):
        super().__init__()
        self.inner, self.causal = Attention(d_model, num_heads, qkv_bias=True, attn_drop=dropout), causal
        self.inner.fused_attn = self.fused

    def forward(self, x, *, key_mask=None, mask=None):
        if key_mask is not None:
            padding = key_mask[:, None, None, :]
            mask = padding if mask is None else padding & mask
        if mask is None:
            return self.inner(x, is_causal=self.causal)
        if self.causal:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.inner(x, attn_mask=mask)

    def part(self, number):
        return lambda x: self.inner.qkv(x).chunk(3, dim=-1)[number]

    q_proj = property(lambda self: self.part(0))
    k_proj = property(lambda self: self.part(1))
    v_proj = property(lambda self: self.part(2))
    out_proj = property(lambda self: self.inner.proj)


class NotFused(Fused):
    """timm.layers.Attention, by its own lines."""

    asked = "the same with `fused_attn` off, as TIMM_FUSED_ATTN=0 does"
    fused = False


MODULES = (Fused, NotFused)
