"""linformer, under the contract."""

import torch
from linformer import LinformerSelfAttention
from torch import nn

LIBRARY = "linformer"


class Linformer(nn.Module):
    """linformer.LinformerSelfAttention with 4 projected keys."""

    asked = "`seq_len=192`, `k=4`; nothing there is like masks or causality; right is its formula, written head by head"
    without = frozenset({"causal", "left_padding", "right_padding", "length_free"})

    def __init__(self, d_model, num_heads, *, dropout=0.0):
        super().__init__()
        self.inner = LinformerSelfAttention(d_model, seq_len=192, k=4, heads=num_heads, dropout=dropout)

    def forward(self, x, context=None):
        return self.inner(x, context)

    def expected(self, x, context=None):
        """The same from its weights; keys and values are mixed along the sequence first."""
        inner, context = self.inner, x if context is None else context
        keys = inner.proj_k[: context.shape[1]].T @ inner.to_k(context)
        values = inner.proj_v[: context.shape[1]].T @ inner.to_v(context)
        parts = zip(*(t.split(inner.dim_head, dim=-1) for t in (inner.to_q(x), keys, values)), strict=True)
        heads = [(q @ k.transpose(1, 2) / inner.dim_head**0.5).softmax(-1) @ v for q, k, v in parts]
        return inner.to_out(torch.cat(heads, dim=-1))


MODULES = (Linformer,)
