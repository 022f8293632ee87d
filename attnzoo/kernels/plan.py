"""How a pattern is computed: which blocks of keys each tile of queries touches, cut into parts."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnzoo.kernels.parts import Gathered, Part, Partial, Rows
from attnzoo.patterns import Pattern
from attnzoo.scope import Scope
from attnzoo.shapes import Place, Span

PART = 5 * 2**16  # scores computed at once: 1.25 MiB in float32, about what a core's own cache holds
PART_ON_GPU = 2**26
TABLE = 2**22  # entries of a block table made at once
MASKS = 2**22  # bytes of masks that a plan may hold; where there are more, the pattern is asked at each call
RUNS = 3  # runs of keys that are still read as slices


class Plan(NamedTuple):
    """The parts of one call, and what they need.

    `size` are the tokens a tile and a block, `most` the scores at once, `pairs` all scores of one sequence; `complete`
    says that every query has a part, `whole_blocks` that tensors are read in whole tiles and blocks.
    """

    parts: tuple[Part, ...]
    size: tuple[int, int]
    most: int
    pairs: int
    complete: bool
    whole_blocks: bool


def plan(scope: Scope, heads: int, groups: int, block: int, device: torch.device) -> Plan:
    """How to compute a call; remembered by value where nothing depends on its tensors."""
    lengths = (scope.query_length, scope.key_length)
    if scope.documents is None and not scope.own_pattern:
        return _remembered(scope.pattern, lengths, heads, groups, block, device)
    with torch.device("cpu"):  # whatever the default device is
        return _Planner(scope.pattern, lengths, heads, groups, block, device, scope).plan()


@functools.lru_cache(maxsize=64)
def _remembered(
    pattern: Pattern, lengths: tuple[int, int], heads: int, groups: int, block: int, device: torch.device
) -> Plan:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        return _Planner(pattern, lengths, heads, groups, block, device).plan()


class _Item(NamedTuple):
    """A tile of one head that is read block by block; `partial` says which blocks may be seen in part only."""

    head: int
    tile: int
    blocks: np.ndarray
    partial: np.ndarray


class _Planner:
    """Makes one plan; with `scope` for a call whose documents, marks or salt say more than the pattern."""

    def __init__(
        self, pattern: Pattern, lengths: tuple[int, int], heads: int, groups: int, block: int, device: torch.device,
        scope: Scope | None = None,
    ) -> None:  # fmt: skip
        self.pattern, self.heads, self.group, self.device, self.scope = pattern, heads, heads // groups, device, scope
        self.lengths, self.offset = lengths, lengths[1] - lengths[0]
        self.size = min(block, lengths[0]), min(block, lengths[1])
        self.part = PART if device.type == "cpu" else PART_ON_GPU
        self.tiles = runs(self.offset, lengths[1], self.size[0], scope)
        self.blocks = runs(0, lengths[1], self.size[1], scope)
        self.parts: list[Part] = []
        self.loose: dict[int, list[_Item]] = {}  # by how many blocks they touch
        self.masks: dict[tuple[bytes, torch.Size], Tensor] = {}
        self.asked = scope is not None and scope.own_pattern
        self.complete = True

    def plan(self) -> Plan:
        table_heads = self.heads if self.pattern.per_head else 1
        at_once = max(1, TABLE // (table_heads * len(self.blocks.first)))
        for start in range(0, len(self.tiles.first), at_once):
            touched, partial = self._table(table_heads, slice(start, start + at_once))
            for tile in range(touched.shape[1]):
                for heads in self._alike(touched[:, tile]):
                    own = heads if table_heads > 1 else slice(0, 1)
                    blocks = np.flatnonzero(touched[own.start, tile])
                    self._place(heads, start + tile, blocks, partial[own, tile][:, blocks])
        most = self.part * 4 // 5  # gathered keys take room where scores are kept, too
        for width, items in sorted(self.loose.items()):
            step = _even(len(items), most // (self.size[0] * width * self.size[1]))
            self.parts += (self._gathered(items[i : i + step]) for i in range(0, len(items), step))
        pairs = sum(math.prod(part.shape) for part in self.parts)
        return Plan(tuple(self.parts), self.size, self.part, pairs, self.complete, bool(self.loose))

    def _table(self, heads: int, chosen: slice) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks these tiles touch, and which of them may be seen in part only, both [1 or h, i, nk]."""
        marked = None if self.tiles.marked is None else self.tiles.marked[chosen]
        tiles = Span(self.tiles.first[chosen], self.tiles.last[chosen], marked, self.tiles.salt)
        touched, covered = table(self.pattern, tiles, self.blocks, heads)
        if self.scope is not None and self.scope.documents is not None:
            touched = touched & may_share(self.scope.documents.cpu(), tiles, self.blocks).any(0)
        return touched.numpy(), ~covered.numpy()

    def _alike(self, touched: np.ndarray) -> Iterator[slice]:
        """Heads next to each other that touch the same blocks, cut so that they are whole groups or lie in one."""
        changes = np.flatnonzero((touched[1:] != touched[:-1]).any(1)) + 1
        for first, last in itertools.pairwise([0, *changes.tolist(), self.heads]):
            whole = -(-first // self.group) * self.group, last // self.group * self.group
            cuts = sorted({first, last, *(cut for cut in whole if first < cut < last)})
            yield from (slice(*pair) for pair in itertools.pairwise(cuts))

    def _place(self, heads: slice, tile: int, blocks: np.ndarray, partial: np.ndarray) -> None:
        """Has a tile read as slices where that pays, else block by block."""
        if not len(blocks):
            self.complete = False
            return
        stretches = _stretches(blocks)
        count = heads.stop - heads.start
        large = count == self.heads or count * self.size[0] * len(blocks) * self.size[1] >= PART // 4
        if self.device.type == "cpu" and len(stretches) <= RUNS and large:
            self._slices(heads, tile, stretches, bool(partial.any()))
        else:
            own = partial if len(partial) > 1 else partial.repeat(count, 0)
            items = (_Item(heads.start + i, tile, blocks, own[i]) for i in range(count))
            self.loose.setdefault(len(blocks), []).extend(items)

    def _slices(self, heads: slice, tile: int, blocks: list[np.ndarray], partial: bool) -> None:
        first, block = tile * self.size[0], self.size[1]
        rows = slice(first, min(first + self.size[0], self.lengths[0]))
        runs: list[slice] = []
        found: list[Partial] = []
        column, empties = 0, True
        for run in blocks:
            tokens = slice(int(run[0]) * block, min((int(run[-1]) + 1) * block, self.lengths[1]))
            to_all = not partial
            if partial:
                tokens, ranges, to_all = self._trimmed(heads, rows, tokens)
                found += (Partial(column + a, column + z, hidden) for a, z, hidden in ranges)
            empties = empties and not to_all
            if tokens.stop > tokens.start:
                runs.append(tokens)
            column += tokens.stop - tokens.start
        if runs:
            self.parts += self._cut(heads, rows, tuple(runs), found, column, empties)
        else:
            self.complete = False

    def _trimmed(self, heads: slice, rows: slice, run: slice) -> tuple[slice, list[Partial], bool]:
        """A run without what nobody sees at its ends, the columns of it that are seen in part, and whether every row
        surely sees some of it."""
        head_count = heads.stop - heads.start if self.pattern.per_head else 1
        length = run.stop - run.start
        if self.asked or head_count * (rows.stop - rows.start) * length > MASKS // 4:
            return run, [Partial(0, length, None)], False
        head = torch.arange(heads.start, heads.start + head_count)[:, None, None]
        row = torch.arange(self.offset + rows.start, self.offset + rows.stop)[:, None]
        seen = self.pattern.sees(Place(row, head), Place(torch.arange(run.start, run.stop), head))
        seen = seen.expand(head_count, len(row), length)
        if (seen[1:] == seen[:1]).all():
            seen = seen[:1]
        by_any = seen.flatten(0, 1).any(0).numpy().nonzero()[0]
        if not len(by_any):
            return slice(run.start, run.start), [], False
        first, last = int(by_any[0]), int(by_any[-1]) + 1
        hidden = ~seen[:, :, first:last]
        columns = hidden.flatten(0, 1).any(0).numpy().nonzero()[0]
        ends = ((int(some[0]), int(some[-1]) + 1) for some in (_stretches(columns) if len(columns) else ()))
        found = [Partial(a, z, self._kept(hidden[:, :, a:z])) for a, z in ends]
        return slice(run.start + first, run.start + last), found, bool(seen.any(-1).all())

    def _kept(self, hidden: Tensor) -> Tensor | None:
        """One tensor for all masks that are equal, None where the plan would hold too many."""
        key = hidden.cpu().numpy().tobytes(), hidden.shape
        if key not in self.masks:
            if sum(mask.nbytes for mask in self.masks.values()) + hidden.nbytes > MASKS:
                return None
            self.masks[key] = hidden.to(self.device, copy=True)
        return self.masks[key]

    def _cut(
        self, heads: slice, rows: slice, runs: tuple[slice, ...], partial: list[Partial], columns: int, empties: bool
    ) -> Iterator[Rows]:
        """Few enough heads, and then rows, for a part's size."""
        count = heads.stop - heads.start
        at_least = self.group if heads.start % self.group == 0 and heads.stop % self.group == 0 else count
        row_step = _even(rows.stop - rows.start, 4 * self.part // (at_least * columns))  # few rows make slow products
        head_step = at_least * _even(count // at_least, self.part // (at_least * row_step * columns))
        for head in range(heads.start, heads.stop, head_step):
            own = slice(head, min(head + head_step, heads.stop))
            groups = slice(head // self.group, (own.stop - 1) // self.group + 1)
            for row in range(rows.start, rows.stop, row_step):
                few = slice(row, min(row + row_step, rows.stop))
                kept = []
                for part in partial:
                    hidden = part.hidden
                    if hidden is not None:
                        hidden = hidden[:, row - rows.start : few.stop - rows.start]
                        if len(hidden) > 1:
                            hidden = hidden[head - heads.start : own.stop - heads.start]
                    kept.append(part._replace(hidden=hidden))
                yield Rows(own, groups, few, runs, tuple(kept), self.offset + row, empties)

    def _gathered(self, items: list[_Item]) -> Gathered:
        head, tile = (torch.tensor([item[i] for item in items], device=self.device) for i in (0, 1))
        blocks = torch.from_numpy(np.stack([item.blocks for item in items]))
        last_tile, last_block = len(self.tiles.first) - 1, len(self.blocks.first) - 1
        filled_up = self.lengths[0] % self.size[0] > 0, self.lengths[1] % self.size[1] > 0
        partial = torch.from_numpy(np.stack([item.partial for item in items]))
        partial |= filled_up[0] & (tile.cpu() == last_tile)[:, None]
        partial |= filled_up[1] & (blocks == last_block)
        item, slot = partial.nonzero().to(self.device).unbind(1)
        part = Gathered(
            head, head // self.group, tile, blocks.to(self.device), (item, slot), None, self.size, self.offset
        )
        size = len(item) * self.size[0] * self.size[1]
        if self.asked or not 0 < size <= MASKS // 4:
            return part
        hidden = part.hidden_by(self.pattern, self.lengths[1])
        hidden = hidden[:1] if (hidden[1:] == hidden[:1]).all() else hidden
        return dataclasses.replace(part, hidden=self._kept(hidden))


def _stretches(numbers: np.ndarray) -> list[np.ndarray]:
    """Rising numbers cut where one is left out."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)


def _even(count: int, most: int) -> int:
    """The size of parts that are as equal as can be."""
    parts = -(-count // max(1, most))
    return -(-count // parts)


def runs(start: int, stop: int, size: int, scope: Scope | None = None) -> Span:
    """The tokens from `start` on in runs of one size, on the CPU, with what a call says about them."""
    first = torch.arange(start, stop, size)
    span = Span(first, (first + size).clamp(max=stop) - 1)
    if scope is None:
        return span
    marked, salt = scope.marked, scope.query.salt
    marked = None if marked is None else _extremes(marked.cpu().int(), span)[1].any(0)
    return dataclasses.replace(span, marked=marked, salt=None if salt is None else salt.cpu())


def table(pattern: Pattern, queries: Span, keys: Span, heads: int) -> tuple[Tensor, Tensor]:
    """Which runs of keys each run of queries touches, and which of them it sees whole, both [heads, n, m]."""
    marked = None if queries.marked is None else queries.marked[:, None]
    rows = Span(queries.first[:, None], queries.last[:, None], marked, queries.salt)
    head, size = torch.arange(heads)[:, None, None], (heads, len(queries.first), len(keys.first))
    touched, covered = (ask(rows, keys, head).expand(size) for ask in (pattern.touches, pattern.covers))
    return touched, covered


def may_share(documents: Tensor, queries: Span, keys: Span) -> Tensor:
    """Whether runs of tokens may have a document in common, [b, n, m]: whether their ids overlap."""
    low, high = zip(*(_extremes(documents, span) for span in (queries, keys)), strict=True)
    return (low[0][:, :, None] <= high[1][:, None]) & (low[1][:, None] <= high[0][:, :, None])


def _extremes(values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The lowest and highest value of each run, [b, n]."""
    longest = int((span.last - span.first).max()) + 1
    index = (span.first[:, None] + torch.arange(longest)).minimum(span.last[:, None])
    return values[:, index.to(values.device, non_blocking=True)].aminmax(dim=-1)
