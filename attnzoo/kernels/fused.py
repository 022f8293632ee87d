"""Torch's fused attention, with the cheapest mask that says the same."""

import torch.nn.functional as F
from einops import rearrange

from attnzoo.kernels.dense import dense
from attnzoo.patterns import Causal, Full
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Values


def fused(q: Queries, k: Keys, v: Values, scope: Scope) -> Heads:
    """Attention by `scaled_dot_product_attention`: no mask where none is needed, `is_causal` where that is all,
    else one bool mask.

    A score term goes through `dense`, whose scores have float32: a term of half precision would lose near
    distances.

    Cost: O(h q k d) time; O(h q d) memory, and O(q k) where a mask is needed.
    """
    if scope.score is not None:
        return dense(q, k, v, scope)
    dtype = q.dtype
    if q.device.type == "cpu" and dtype.itemsize == 2:  # there torch sums gradients in half precision, and is no faster
        q, k, v = q.float(), k.float(), v.float()
    queries, group = q.shape[2], q.shape[1] // k.shape[1]
    all_before = scope.pattern == Causal() and queries <= 1  # the last token sees everything
    causal = scope.pattern == Causal() and queries == k.shape[2] and not all_before
    visible = seen = None
    if not (scope.pattern_alone and (scope.pattern == Full() or all_before or causal)):
        visible, causal = scope.visible(), False
        seen = visible.any(-1, keepdim=True)  # backends differ over empty rows: let those see all, and drop the result
        visible = (visible | ~seen).expand(-1, -1, queries, -1)
    fold = group > 1 and queries == 1  # a group's queries as rows over the keys as they are stored
    if fold:
        q = rearrange(q, "b (g r) 1 d -> b g r d", r=group)
        if visible is not None and visible.shape[1] > 1:
            visible = rearrange(visible, "b (g r) 1 k -> b g r k", r=group)
    shared = group > 1 and not fold
    out = F.scaled_dot_product_attention(q, k, v, visible, scope.dropout, is_causal=causal, enable_gqa=shared)
    if fold:
        out = rearrange(out, "b g r f -> b (g r) 1 f")
    return (out if seen is None else out.masked_fill(~seen, 0)).to(dtype)
