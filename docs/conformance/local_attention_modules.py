"""local-attention, under the contract."""

from local_attention import LocalMHA as Attention
from torch import nn

LIBRARY = "local-attention"
WINDOW = 3


class LocalMHA(nn.Module):
    """local_attention.LocalMHA with its exact window, without rotary positions."""

    asked = "`window_size=3`, `use_rotary_pos_emb=False`, `mask` for key_mask; a window of 3 sees 3 tokens to each side"
    pattern = f"Local({WINDOW})"

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0):
        super().__init__()
        self.inner = Attention(
            dim=d_model, window_size=WINDOW, dim_head=d_model // num_heads, heads=num_heads, causal=causal,
            dropout=dropout, use_rotary_pos_emb=False,
        )  # fmt: skip

    def forward(self, x, *, key_mask=None):
        return self.inner(x, mask=key_mask)

    def part(self, number):
        return lambda x: self.inner.to_qkv(x).chunk(3, dim=-1)[number]

    q_proj = property(lambda self: self.part(0))
    k_proj = property(lambda self: self.part(1))
    v_proj = property(lambda self: self.part(2))
    out_proj = property(lambda self: self.inner.to_out)


MODULES = (LocalMHA,)
