"""Torch's fused attention, with the cheapest mask that says the same."""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.kernels.blocks import applies
from attnzoo.kernels.dense import dense
from attnzoo.patterns import Causal, Full, Pattern
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Values

FEW = 16  # up to so many queries, reading the keys takes longer than computing with them
REMEMBERED = 2**20  # pairs of a mask that is still kept
PART = 256  # queries over keys with gaps that are computed at once


def fused(q: Queries, k: Keys, v: Values, scope: Scope) -> Heads:
    """Attention by `scaled_dot_product_attention`: no mask where none is needed, `is_causal` where that is all,
    else one mask, which is remembered where it is small and follows from the pattern alone.

    A score term goes through `dense`, whose scores have float32: a term of half precision would lose near
    distances.

    Cost: O(h q k d) time; O(h q d) memory, and O(q k) where a mask is needed.
    """
    if scope.gaps and q.shape[2] > PART and not torch.compiler.is_compiling():
        return _in_parts(q, k, v, scope)
    if scope.score is not None:
        return dense(q, k, v, scope)
    dtype, shared = q.dtype, bool(q.shape[1] > k.shape[1])
    few = q.shape[2] < k.shape[2] and not torch.compiler.is_exporting() and q.shape[2] <= FEW
    if q.device.type == "cpu" and dtype.itemsize == 2 and not (few and not torch.is_grad_enabled()):
        q, k, v = q.float(), k.float(), v.float()  # torch sums gradients in half precision there, and is no faster
    mask = seen = None
    causal = False  # a plain bool: in a graph a comparison of lengths is none
    if scope.pattern_alone and scope.pattern == Causal() and q.shape[2] == k.shape[2]:
        causal = True
    elif not (scope.all_visible or (scope.pattern_alone and scope.pattern == Full())):
        mask, seen = _mask(q, k, scope)
    if few and shared:
        out = _folded(q, k, v, mask, scope.dropout)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, scope.dropout, causal, enable_gqa=shared)
    return (out if seen is None else out.masked_fill(~seen, 0)).to(dtype)


def _mask(q: Queries, k: Keys, scope: Scope) -> tuple[Tensor | None, Tensor | None]:
    """The mask, and which queries see anything; None where all do.

    Backends differ over rows that see nothing: those see all here, and what they get is dropped.
    """
    if q.shape[2] > 1 and remembers(q, k, scope) and applies(q, k):
        return _remembered(scope.pattern, q.shape[1], q.shape[2], k.shape[2], q.dtype, q.device)
    visible = scope.visible()
    seen = visible.any(-1, keepdim=True)
    return (visible | ~seen).expand(-1, -1, q.shape[2], -1), seen


def remembers(q: Queries, k: Keys, scope: Scope) -> bool:
    """Whether the mask of a call is small, and follows from the pattern alone."""
    heads = q.shape[1] if scope.pattern.per_head else 1
    own = scope.gaps or scope.own_pattern or not scope.pattern_alone
    return not own and heads * q.shape[2] * k.shape[2] <= REMEMBERED


@functools.lru_cache(maxsize=8)
def _remembered(
    pattern: Pattern, heads: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of a pattern as torch's kernels want it, added to the scores; none where it shows everything."""
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        visible = pattern.visible(queries, keys, heads)[None]
        seen = visible.any(-1, keepdim=True)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(seen & ~visible, -math.inf)
        return None if visible.all() else mask, None if seen.all() else seen


def _folded(q: Queries, k: Keys, v: Values, mask: Tensor | None, dropout: float) -> Heads:
    """The same with the queries of a group as rows over the keys as they are stored, which are read once."""
    groups, group, queries = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    if mask is not None and mask.shape[1] > 1:
        mask = rearrange(mask, "b (g r) q k -> b g (r q) k", g=groups)
    elif mask is not None and queries > 1:
        mask = repeat(mask, "b 1 q k -> b 1 (r q) k", r=group)
    rows = q.unflatten(1, (groups, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k, v, mask, dropout)
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
