"""Sparse attention in blocks: what the pattern can't reach is never computed.

Queries are cut into tiles, keys into blocks. The pattern says which blocks each tile of each head touches. Tiles that
touch equally many are computed together, a part at a time, and each part is computed again in backward, so that memory
stays linear.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.kernels.dense import dense, masked_softmax
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Place, Queries, Span, Values

PART = 2**20  # scores computed at once: 4 MiB in float32


class Part(NamedTuple):
    """Tiles [i] of queries that touch m blocks of keys each, and where their tokens stand."""

    tile: Tensor  # [i]
    blocks: Tensor  # [i, m]
    group: Tensor  # [i, 1], the key-value head
    query: Place  # [i, tile, 1]
    key: Place  # [i, 1, m * block]
    partial: tuple[Tensor, Tensor]  # which (i, m) the pattern lets see in part only
    seed: int


def blocks(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention over the blocks of keys that the pattern touches.

    Cost: O(p d) time for p pairs in the touched blocks; O(h (q + k) d) memory and a fixed amount for the part at work.
    """
    if q.numel() == 0 or k.shape[2] == 0:
        return dense(q, k, v, scope)  # nothing to cut
    parameters: list[Tensor] = list(scope.score.parameters()) if isinstance(scope.score, torch.nn.Module) else []
    tile = min(block, q.shape[2])
    parts = list(_parts(q, k, scope, tile, block))
    return _Blocks.apply(q, k, v, scope, parts, tile, block, *parameters)


def _parts(q: Tensor, k: Tensor, scope: Scope, tile: int, block: int) -> Iterator[Part]:
    heads, (groups, keys) = q.shape[1], k.shape[1:3]
    queries, columns = _spans(scope.key_length - scope.query_length, keys, tile), _spans(0, keys, block)
    rows = Span(queries.first[:, None], queries.last[:, None])
    head = torch.arange(heads)[:, None, None]
    size = (heads, len(queries.first), len(columns.first))
    touched = scope.pattern.touches(rows, columns, head).expand(size).flatten(0, 1)
    covered = scope.pattern.covers(rows, columns, head)
    filled_up = (rows.last - rows.first + 1 < tile) | (columns.last - columns.first + 1 < block)
    partial = (filled_up | ~covered).expand(size).flatten(0, 1)
    widths = touched.sum(-1)
    for width in widths.unique().tolist():
        alike = (widths == width).nonzero().flatten()
        for chosen in alike.split(max(1, PART // (len(q) * tile * width * block))) if width else ():
            number, there = touched[chosen].nonzero()[:, 1].view(len(chosen), width), chosen % size[1]
            head = chosen // size[1]
            query = queries.first[there][:, None] + torch.arange(tile)
            key = (columns.first[number][:, :, None] + torch.arange(block)).flatten(1)
            item, slot = partial[chosen].gather(1, number).nonzero().unbind(1)
            move = (there, number, (head // (heads // groups))[:, None], query[:, :, None], key[:, None], item, slot)
            there, number, group, query, key, item, slot = (tensor.to(q.device) for tensor in move)
            place = head[:, None, None].to(q.device)
            seed = int(torch.randint(2**62, ())) if scope.dropout else 0
            yield Part(there, number, group, Place(query, place), Place(key, place), (item, slot), seed)


def _spans(start: int, stop: int, size: int) -> Span:
    first = torch.arange(start, stop, size)
    return Span(first, (first + size).clamp(max=stop) - 1)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scope: Scope,
        parts: list[Part],
        tile: int,
        block: int,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scope, ctx.parts, ctx.tile, ctx.block, ctx.parameters = scope, parts, tile, block, parameters
        cut = (_cut(q, tile), _cut(k, block), _cut(v, block))
        out = _empty_cut(q, v.shape[-1], tile)
        for part in parts:
            out[:, part.query.head[:, 0, 0], part.tile] = _attend(_gather(cut, part), scope, part).to(v.dtype)
        return _joined(out, q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        cut, grad = (_cut(q, ctx.tile), _cut(k, ctx.block), _cut(v, ctx.block)), _cut(grad, ctx.tile)
        grad_q = _empty_cut(q, q.shape[-1], ctx.tile)
        grad_k, grad_v = (torch.zeros(keys.shape, dtype=wide, device=q.device) for keys in cut[1:])
        grad_parameters: list[Tensor | None] = [None] * len(ctx.parameters)
        for part in ctx.parts:
            pieces = [piece.requires_grad_() for piece in _gather(cut, part)]
            with torch.enable_grad():
                out = _attend(pieces, ctx.scope, part)
            inputs, above = [*pieces, *ctx.parameters], grad[:, part.query.head[:, 0, 0], part.tile].to(wide)
            new_q, new_k, new_v, *new = torch.autograd.grad(out, inputs, above, allow_unused=True)
            grad_q[:, part.query.head[:, 0, 0], part.tile] = new_q.to(q.dtype)
            numbers = (part.group * grad_k.shape[2] + part.blocks).flatten()
            for total, more in ((grad_k, new_k), (grad_v, new_v)):
                total.flatten(1, 2).index_add_(1, numbers, more.unflatten(2, (-1, ctx.block)).flatten(1, 2))
            grad_parameters = [_sum(old, more) for old, more in zip(grad_parameters, new, strict=True)]
        grads = (_joined(grad_q, q), _joined(grad_k, k).to(k.dtype), _joined(grad_v, v).to(v.dtype))
        return (*grads, None, None, None, None, *grad_parameters)


def _cut(x: Tensor, size: int) -> Tensor:
    """Heads [b, h, t, d] cut along t: [b, h, n, size, d], a view where size divides t, else filled up with zeros."""
    rest = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(2, (-1, size))


def _empty_cut(x: Tensor, features: int, size: int) -> Tensor:
    """Zeros for the cut of a tensor like x, laid out as tokens are, so that joining the heads copies nothing."""
    return x.new_zeros(x.shape[0], -(-x.shape[2] // size), size, x.shape[1], features).permute(0, 3, 1, 2, 4)


def _joined(cut: Tensor, x: Tensor) -> Tensor:
    return cut.flatten(2, 3)[:, :, : x.shape[2]]


def _gather(cut: tuple[Tensor, Tensor, Tensor], part: Part) -> list[Tensor]:
    """Queries [b, i, tile, d] and keys and values [b, i, m * block, d] of a part, in float32 at least."""
    q, k, v = cut
    wide = torch.promote_types(q.dtype, torch.float32)
    found = (q[:, part.query.head[:, 0, 0], part.tile], *(x[:, part.group, part.blocks].flatten(2, 3) for x in (k, v)))
    return [piece.detach().to(wide) for piece in found]


def _attend(pieces: list[Tensor], scope: Scope, part: Part) -> Tensor:
    """Attention of a part's tiles over its blocks, as in `dense`."""
    q, k, v = pieces
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    if scope.score is not None:
        scores = scope.score(scores, part.query, part.key)
    weights = masked_softmax(scores, _visible(scope, part))
    if scope.dropout:
        generator = torch.Generator(q.device).manual_seed(part.seed)  # backward must drop the same
        kept = torch.rand(weights.shape, generator=generator, device=q.device) >= scope.dropout
        weights = weights * kept / (1 - scope.dropout)
    return weights @ v


def _visible(scope: Scope, part: Part) -> Tensor | None:
    """What queries see in their blocks, None for everything; the pattern is asked only where it must be."""
    item, slot = part.partial
    if scope.pattern_alone and not len(item):
        return None
    query, key, last = part.query.index, part.key.index, scope.key_length - 1
    by_block = key.unflatten(2, (*part.blocks.shape[1:], -1))  # [i 1 m block]
    seen = torch.ones(len(query), query.shape[1], *by_block.shape[2:], dtype=torch.bool, device=query.device)
    if len(item):
        some = Place(query[item], part.query.head[item]), Place(by_block[item, :, slot], part.key.head[item])
        real = (some[0].index <= last) & (some[1].index <= last)  # no token stands where tiles and blocks are filled up
        seen[item, :, slot] = scope.pattern.sees(*some) & real
    inside = (Place(place.index.clamp(max=last), place.head) for place in (part.query, part.key))
    return scope.less(seen.flatten(2), *inside)


def _sum(old: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if old is None else old if more is None else old + more
