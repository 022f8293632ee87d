"""Sparse attention in blocks: what the pattern can't reach is never computed.

Queries are cut into tiles, keys into blocks. The pattern says which blocks each tile of each head touches. Tiles that
touch equally many are computed together, a part at a time, and each part is computed again in backward, so that memory
stays linear.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.errors import NotSupportedError
from attnzoo.kernels.dense import dense, masked_softmax, without_autocast
from attnzoo.patterns import Pattern
from attnzoo.scope import Scope, places
from attnzoo.scores import Score
from attnzoo.shapes import Heads, Keys, Place, Queries, Span, Values

PART = 2**20  # scores computed at once: 4 MiB in float32
REMEMBERED = 2**20  # entries of a table that is still kept
MASKS = ("key_mask", "mask", "documents", "marked")
Three = tuple[Tensor, Tensor, Tensor]


class Part(NamedTuple):
    """Tiles [i] of queries that touch m blocks of keys each, numbered over all heads, and where their tokens stand."""

    tiles: Tensor  # [i]
    blocks: Tensor  # [i, m]
    head: Tensor  # [i]
    rows: Tensor  # [i], the first token of each tile
    columns: Tensor  # [i, m], the first token of each block
    partial: tuple[Tensor, Tensor]  # which (i, m) the pattern lets see in part only
    seed: int


class Plan(NamedTuple):
    """How one call is computed."""

    scope: Scope
    parts: list[Part]
    tile: int
    block: int


def blocks(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention over the blocks of keys that the pattern touches; in a graph and under torch.func, over all keys.

    Cost: O(p d) time for p pairs in the touched blocks; O(h (q + k) d) memory, a fixed amount for the part, and a
    table of h (q / block) (k / block) entries, so that very small blocks take memory too. Over all keys as `dense`.
    """
    if q.numel() == 0 or k.shape[2] == 0:
        return dense(q, k, v, scope)  # nothing to cut
    if torch.compiler.is_compiling() or q.is_meta or _transformed():  # there tables of numbers can't be made
        return dense(q, k, v, scope)
    parameters: list[Tensor] = list(scope.score.parameters()) if isinstance(scope.score, torch.nn.Module) else []
    tile, block = min(block, q.shape[2]), min(block, k.shape[2])
    plan = Plan(scope, list(_parts(q, k, scope, tile, block)), tile, block)
    return _Blocks.apply(q, k, v, plan, *parameters)


def _transformed() -> bool:
    """Whether the call is under torch.func, say in vmap; torch has no public way to ask."""
    level = getattr(torch._C._functorch, "maybe_current_level", None)
    return level is not None and level() is not None


def _parts(q: Tensor, k: Tensor, scope: Scope, tile: int, block: int) -> Iterator[Part]:
    heads, groups = q.shape[1], k.shape[1]
    queries, columns = _spans(scope, scope.key_length - scope.query_length, tile), _spans(scope, 0, block)
    size = (heads, len(queries.first), len(columns.first))
    own = scope.marked is not None or scope.query.salt is not None  # then the table is this call's alone
    if own or size[0] * size[1] * size[2] > REMEMBERED:
        touched, partial = _table(scope.pattern, heads, queries, columns)
    else:
        lengths = (scope.query_length, scope.key_length)
        touched, partial = _remembered(scope.pattern, heads, lengths, tile, block)
    if scope.documents is not None:
        touched = touched & _may_share(scope.documents.cpu(), queries, columns)
    touched, partial = touched.flatten(0, 1), partial.flatten(0, 1)
    widths = touched.sum(-1)
    for width in widths.unique().tolist():
        alike = (widths == width).nonzero().flatten()
        for tiles in alike.split(max(1, PART // (len(q) * tile * width * block))) if width else ():
            number = touched[tiles].nonzero()[:, 1].view(len(tiles), width)
            item, slot = partial[tiles].gather(1, number).nonzero().unbind(1)
            head = tiles // size[1]
            first = queries.first[tiles % size[1]], columns.first[number]
            number = number + (head // (heads // groups) * size[2])[:, None]
            move = (tiles, number, head, *first, item, slot)
            tiles, number, head, row, column, item, slot = (tensor.to(q.device) for tensor in move)
            seed = int(torch.randint(2**62, ())) if scope.dropout else 0
            yield Part(tiles, number, head, row, column, (item, slot), seed)


@functools.lru_cache(maxsize=64)
def _remembered(pattern: Pattern, heads: int, lengths: tuple[int, int], tile: int, block: int) -> tuple[Tensor, Tensor]:
    """The table of a pattern, by value; nothing of it depends on tensors of a call."""
    with torch.inference_mode(False):
        queries, keys = lengths
        scope = Scope(pattern, *places(heads, queries, keys, torch.device("cpu")))
        return _table(pattern, heads, _spans(scope, keys - queries, tile), _spans(scope, 0, block))


def _table(pattern: Pattern, heads: int, queries: Span, columns: Span) -> tuple[Tensor, Tensor]:
    """Which tiles touch which blocks, and which pairs of these the pattern lets see in part only, both [h, nq, nk]."""
    rows, head = _standing(queries), torch.arange(heads)[:, None, None]
    tile, block = (int(span.last[0] - span.first[0]) + 1 for span in (queries, columns))
    filled_up = (rows.last - rows.first + 1 < tile) | (columns.last - columns.first + 1 < block)
    size = (heads, len(queries.first), len(columns.first))
    touched, covered = pattern.touches(rows, columns, head), pattern.covers(rows, columns, head)
    return touched.expand(size), (filled_up | ~covered).expand(size)


def _spans(scope: Scope, start: int, size: int) -> Span:
    """The tokens from `start` on in runs of one size, on the CPU."""
    first = torch.arange(start, scope.key_length, size)
    span = Span(first, (first + size).clamp(max=scope.key_length) - 1)
    marked = None if scope.marked is None else _extremes(scope.marked.cpu().int(), span)[1].any(0)
    salt = scope.query.salt
    return dataclasses.replace(span, marked=marked, salt=None if salt is None else salt.cpu())


def _may_share(documents: Tensor, queries: Span, keys: Span) -> Tensor:
    """Whether runs of tokens may have a document in common, [n, m]: whether their ids overlap in any sequence."""
    low, high = zip(*(_extremes(documents, span) for span in (queries, keys)), strict=True)
    return ((low[0][:, :, None] <= high[1][:, None]) & (low[1][:, None] <= high[0][:, :, None])).any(0)


def _extremes(values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The lowest and highest value of each run, [b, n]."""
    longest = int((span.last - span.first).max()) + 1
    index = (span.first[:, None] + torch.arange(longest)).minimum(span.last[:, None])
    return values[:, index].aminmax(dim=-1)


def _standing(span: Span) -> Span:
    """Runs along rows in place of columns."""
    marked = None if span.marked is None else span.marked[:, None]
    return Span(span.first[:, None], span.last[:, None], marked, span.salt)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, *parameters: Tensor) -> Tensor:
        cut = (_cut(q, plan.tile), _cut(k, plan.block), _cut(v, plan.block))
        # Masks are saved so that torch notices a change meanwhile; q, k and v are not, so that they need not stay.
        ctx.save_for_backward(*cut, *(getattr(plan.scope, name) for name in MASKS), *parameters)
        ctx.plan = plan
        ctx.heads, ctx.groups, ctx.lengths = q.shape[1], k.shape[1], (q.shape[2], k.shape[2])
        out = _TokenOrder(cut[0], q.shape[1], v.shape[-1])
        for part in plan.parts:
            out.put(part, _attend(_gather(cut, part), plan.scope, part))
        return out.heads(q.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph: what is computed again here has no derivative of its own
            raise NotSupportedError("attention in blocks has first derivatives only: use a dense variant for more")
        with without_autocast(grad):
            return _backward(ctx, _cut(grad, ctx.plan.tile))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *saved = ctx.saved_tensors
    masks, saved = dict(zip(MASKS, saved, strict=False)), saved[len(MASKS) :]
    needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:]]
    parameters = [tensor.detach().requires_grad_(need) for tensor, need in zip(saved, needs[3:], strict=True)]
    scope = _with_parameters(dataclasses.replace(ctx.plan.scope, **masks), parameters)
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad_q = _TokenOrder(q, ctx.heads, q.shape[-1])
    sums = [torch.zeros_like(keys, dtype=wide) for keys in (k, v)]
    of_parameters: list[Tensor | None] = [None] * len(parameters)
    for part in ctx.plan.parts:
        pieces = _gather((q, k, v), part)
        for piece, need in zip(pieces, needs[:3], strict=True):
            piece.requires_grad_(need)
        with torch.enable_grad():
            out = _attend(pieces, scope, part)
        asked = [tensor for tensor, need in zip((*pieces, *parameters), needs, strict=True) if need]
        found = iter(torch.autograd.grad(out, asked, grad.index_select(1, part.tiles).to(wide), allow_unused=True))
        new_q, new_k, new_v, *new = (next(found) if need else None for need in needs)
        if new_q is not None:
            grad_q.put(part, new_q)
        for total, more in zip(sums, (new_k, new_v), strict=True):
            if more is not None:
                total.index_add_(1, part.blocks.flatten(), more.unflatten(2, (-1, total.shape[2])).flatten(1, 2))
        of_parameters = [_sum(old, more) for old, more in zip(of_parameters, new, strict=True)]
    queries, keys = ctx.lengths
    joined = (total.unflatten(1, (ctx.groups, -1)).flatten(2, 3)[:, :, :keys].to(grad.dtype) for total in sums)
    return (grad_q.heads(queries), *joined, None, *of_parameters)


def _with_parameters(scope: Scope, parameters: list[Tensor]) -> Scope:
    """The scope with a score that computes with these parameters, whatever its module holds by now."""
    if not parameters:
        return scope
    module = cast(torch.nn.Module, scope.score)
    named = dict(zip((name for name, _ in module.named_parameters()), parameters, strict=True))
    score = cast(Score, lambda *call: torch.func.functional_call(module, named, call))
    return dataclasses.replace(scope, score=score)


class _TokenOrder:
    """Tiles to fill, laid out in memory as tokens are, so that joining the heads copies nothing."""

    def __init__(self, cut: Tensor, heads: int, features: int) -> None:
        tiles = cut.shape[1] // heads
        self.tiles = cut.new_zeros(cut.shape[0], tiles, cut.shape[2], heads, features).permute(0, 3, 1, 2, 4)

    def put(self, part: Part, piece: Tensor) -> None:
        self.tiles[:, part.head, part.tiles % self.tiles.shape[2]] = piece.to(self.tiles.dtype)

    def heads(self, length: int) -> Tensor:
        """[b, h, t, f]"""
        return self.tiles.flatten(2, 3)[:, :, :length]


def _cut(x: Tensor, size: int) -> Tensor:
    """Heads [b, h, t, d] cut along t, the last cut filled up with zeros: [b, (h n), size, d], contiguous."""
    missing = -x.shape[2] % size
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return filled.unflatten(2, (-1, size)).flatten(1, 2)


def _gather(cut: Three, part: Part) -> Three:
    """Queries [b, i, tile, d] and keys and values [b, i, m * block, d] of a part, in float32 at least."""
    q, k, v = cut
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (
        x.index_select(1, part.blocks.flatten()).unflatten(1, part.blocks.shape).flatten(2, 3) for x in (k, v)
    )
    return q.index_select(1, part.tiles).to(wide), keys.to(wide), values.to(wide)


def _attend(pieces: Three, scope: Scope, part: Part) -> Tensor:
    """Attention of a part's tiles over its blocks, as in `dense`."""
    q, k, v = pieces
    block = k.shape[2] // part.blocks.shape[1]
    rows = _tokens(part.rows, q.shape[2])[:, :, None]  # [i tile 1]
    columns = _tokens(part.columns, block)[:, None]  # [i 1 m block]
    last, head = scope.key_length - 1, part.head[:, None, None]
    inside = Place(rows.clamp(max=last), head), Place(columns.flatten(2).clamp(max=last), head)
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    if scope.score is not None:
        scores = scope.score(scores, *inside)
    weights = masked_softmax(scores, _visible(scope, part, rows, columns, inside))
    if scope.dropout:
        generator = torch.Generator(q.device).manual_seed(part.seed)  # backward must drop the same
        kept = torch.rand(weights.shape, generator=generator, device=q.device) >= scope.dropout
        weights = weights * kept / (1 - scope.dropout)
    return weights @ v


def _tokens(first: Tensor, size: int) -> Tensor:
    """The tokens of tiles or blocks, by the first of each."""
    return first[..., None] + torch.arange(size, device=first.device)


def _visible(scope: Scope, part: Part, rows: Tensor, columns: Tensor, inside: tuple[Place, Place]) -> Tensor | None:
    """What queries see in their blocks, None for everything; the pattern is asked only where it must be."""
    item, slot = part.partial
    if scope.pattern_alone and not len(item):
        return None
    batch, last = 1 if scope.marked is None else len(scope.marked), scope.key_length - 1
    seen = torch.ones(batch, *rows.shape[:2], *columns.shape[2:], dtype=torch.bool, device=rows.device)
    if len(item):
        head, rows, columns = part.head[item][:, None, None], rows[item], columns[item, :, slot]
        real = (rows <= last) & (columns <= last)  # no token stands where tiles and blocks are filled up
        places = (scope.place(index.clamp(max=last), head) for index in (rows, columns))
        found = (scope.pattern.sees(*places) & real).expand(batch, -1, -1, -1)
        seen[:, item, :, slot] = found.transpose(0, 1)  # torch puts the chosen items in front
    return scope.less(seen.flatten(3), *inside)


def _sum(old: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if old is None else old if more is None else old + more
