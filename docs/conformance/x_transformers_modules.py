"""x-transformers, under the contract."""

from torch import nn
from x_transformers.x_transformers import Attention

LIBRARY = "x-transformers"


class Eager(nn.Module):
    """x_transformers.Attention with flash=False."""

    asked = "`mask` and `context_mask` for key_mask, `attn_mask` for mask; True may look there too"
    flash = False
    close = 1e-5  # its softmax is float32 in every dtype

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0):
        super().__init__()
        self.inner = Attention(
            d_model, dim_head=d_model // num_heads, heads=num_heads, causal=causal, dropout=dropout, flash=self.flash
        )

    def forward(self, x, context=None, *, key_mask=None, mask=None):
        padding = {"mask" if context is None else "context_mask": key_mask}
        return self.inner(x, context=context, attn_mask=mask, **padding)

    q_proj = property(lambda self: self.inner.to_q)
    k_proj = property(lambda self: self.inner.to_k)
    v_proj = property(lambda self: self.inner.to_v)
    out_proj = property(lambda self: self.inner.to_out)


class Flash(Eager):
    """x_transformers.Attention with flash=True."""

    asked = "the same with `flash=True`"
    flash = True
    close = 1e-9


MODULES = (Eager, Flash)
