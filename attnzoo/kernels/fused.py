"""Torch's fused attention, with the cheapest mask that says the same."""

import dataclasses

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.kernels.dense import dense
from attnzoo.patterns import Causal, Full
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Values

FEW = 16  # up to so many queries, reading the keys takes longer than computing with them
PART = 256  # queries over keys with gaps that are computed at once


def fused(q: Queries, k: Keys, v: Values, scope: Scope) -> Heads:
    """Attention by `scaled_dot_product_attention`: no mask where none is needed, `is_causal` where that is all,
    else one bool mask.

    A score term goes through `dense`, whose scores have float32: a term of half precision would lose near
    distances.

    Cost: O(h q k d) time; O(h q d) memory, and O(q k) where a mask is needed.
    """
    if scope.gaps and q.shape[2] > PART and not torch.compiler.is_compiling():
        return _in_parts(q, k, v, scope)
    if scope.score is not None:
        return dense(q, k, v, scope)
    dtype, shared = q.dtype, q.shape[1] > k.shape[1]
    few = q.shape[2] < k.shape[2] and not torch.compiler.is_exporting() and q.shape[2] <= FEW
    if q.device.type == "cpu" and dtype.itemsize == 2 and not (few and not torch.is_grad_enabled()):
        q, k, v = q.float(), k.float(), v.float()  # torch sums gradients in half precision there, and is no faster
    visible = seen = None
    causal = False
    if scope.pattern_alone and scope.pattern == Causal() and q.shape[2] == k.shape[2]:
        causal = True
    elif not (scope.all_visible or (scope.pattern_alone and scope.pattern == Full())):
        visible = scope.visible()
        seen = visible.any(-1, keepdim=True)  # backends differ over empty rows: let those see all, and drop the result
        visible = (visible | ~seen).expand(-1, -1, q.shape[2], -1)
    if few and shared:
        out = _folded(q, k, v, visible, scope.dropout)
    else:
        out = F.scaled_dot_product_attention(q, k, v, visible, scope.dropout, causal, enable_gqa=shared)
    return (out if seen is None else out.masked_fill(~seen, 0)).to(dtype)


def _folded(q: Queries, k: Keys, v: Values, visible: Tensor | None, dropout: float) -> Heads:
    """The same with the queries of a group as rows over the keys as they are stored, which are read once."""
    groups, group, queries = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    if visible is not None and visible.shape[1] > 1:
        visible = rearrange(visible, "b (g r) q k -> b g (r q) k", g=groups)
    elif visible is not None and queries > 1:
        visible = repeat(visible, "b 1 q k -> b 1 (r q) k", r=group)
    rows = q.unflatten(1, (groups, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k, v, visible, dropout)
    return out.unflatten(2, (group, queries)).flatten(1, 2)


def _in_parts(q: Queries, k: Keys, v: Values, scope: Scope) -> Heads:
    """The same, a part of the queries at a time over the keys that it sees."""
    out = []
    for rows in torch.arange(q.shape[2], device=q.device).split(PART):
        part = scope.narrowed(scope.query.head.flatten(), rows)
        seen = part.visible().flatten(0, 2).any(0).nonzero().flatten()
        marked = None if part.key.marked is None else part.key.marked[..., seen]
        key = dataclasses.replace(part.key, index=part.key.index[..., seen], marked=marked)
        keys, values = k.index_select(2, seen), v.index_select(2, seen)
        out.append(fused(q[:, :, rows], keys, values, dataclasses.replace(part, key=key)))
    return torch.cat(out, dim=2)
