"""What torch itself offers, under the contract."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LIBRARY = "torch"


def hides(mask):
    """Here True may look, there True hides; what is not bool goes through as it is."""
    return ~mask if mask.dtype == torch.bool else mask


def allowed(x, context, causal, key_mask, mask):
    """One bool mask that broadcasts to [b, h, q, k], True = may look, as `scaled_dot_product_attention` takes it."""
    parts = [] if mask is None else [mask]
    if key_mask is not None:
        parts.append(key_mask[:, None, None, :])
    if causal:
        q, k = x.shape[1], context.shape[1]
        parts.append(torch.ones(q, k, dtype=torch.bool, device=x.device).tril(k - q))
    if not parts:
        return None
    joined = parts[0]
    for part in parts[1:]:
        joined = joined & part
    return joined


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention as its defaults are, which return the weights too."""

    asked = "`batch_first=True`; bool masks with their polarity turned; causality as `attn_mask`; 4-D as [b * h, q, k]"
    need_weights = True

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0, bias=True):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, num_heads, dropout=dropout, bias=bias, batch_first=True)
        self.causal = causal

    def forward(self, x, context=None, *, values=None, key_mask=None, mask=None):
        context = x if context is None else context
        values = context if values is None else values
        batch, q, k = x.shape[0], x.shape[1], context.shape[1]
        if mask is not None and mask.dim() == 4:
            mask = mask.expand(batch, self.inner.num_heads, q, k).flatten(0, 1)
        if self.causal:
            before = torch.ones(q, k, dtype=torch.bool, device=x.device).tril(k - q)
            mask = before if mask is None else mask & before
        return self.inner(
            x,
            context,
            values,
            key_padding_mask=None if key_mask is None else hides(key_mask),
            attn_mask=None if mask is None else hides(mask),
            need_weights=self.need_weights,
        )[0]

    def rows(self, part):
        d_model = self.inner.embed_dim
        rows = slice(part * d_model, (part + 1) * d_model)
        bias = self.inner.in_proj_bias
        return lambda x: F.linear(x, self.inner.in_proj_weight[rows], None if bias is None else bias[rows])

    q_proj = property(lambda self: self.rows(0))
    k_proj = property(lambda self: self.rows(1))
    v_proj = property(lambda self: self.rows(2))
    out_proj = property(lambda self: self.inner.out_proj)


class MultiheadAttentionWithoutWeights(MultiheadAttention):
    """torch.nn.MultiheadAttention with need_weights=False, which is computed by scaled_dot_product_attention."""

    asked = "the same with `need_weights=False`"
    need_weights = False


class Projected(nn.Module):
    """Four linear layers around a function of q, k and v, which have no weights of their own."""

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0):
        super().__init__()
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class ScaledDotProductAttention(Projected):
    """torch.nn.functional.scaled_dot_product_attention between four linear layers."""

    asked = "one bool `attn_mask` of all masks; `is_causal=True` where there are none, in self-attention"

    def forward(self, x, context=None, *, values=None, key_mask=None, mask=None):
        context = x if context is None else context
        values = context if values is None else values
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(context)), self.heads(self.v_proj(values))
        alone = self.causal and context is x and key_mask is None and mask is None
        given = None if alone else allowed(x, context, self.causal, key_mask, mask)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=given, dropout_p=dropout, is_causal=alone)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class FlexAttention(Projected):
    """torch.nn.attention.flex_attention between four linear layers, uncompiled."""

    asked = "every mask in a `mask_mod`, handed over as a `BlockMask`; it has no dropout, and no backward on CPU"
    backward = torch.cuda.is_available()

    def __init__(self, d_model, num_heads, *, causal=False):
        super().__init__(d_model, num_heads, causal=causal)

    def forward(self, x, context=None, *, values=None, key_mask=None, mask=None):
        context = x if context is None else context
        values = context if values is None else values
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(context)), self.heads(self.v_proj(values))
        sizes = x.shape[0], self.num_heads, q.shape[2], k.shape[2]
        given = allowed(x, context, self.causal, key_mask, mask)
        block_mask = None
        if given is not None:
            given = given.expand(sizes)
            block_mask = create_block_mask(lambda b, h, i, j: given[b, h, i, j], *sizes, device=x.device)
        return self.out_proj(flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2).flatten(2))


MODULES = (MultiheadAttention, MultiheadAttentionWithoutWeights, ScaledDotProductAttention, FlexAttention)
