"""What is computed together: some queries and all the keys that they may look at, and how both are read and written."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.patterns import Pattern
from attnzoo.scope import Scope
from attnzoo.shapes import Place


class Partial(NamedTuple):
    """Columns of a part that the pattern shows in part only; `hidden` [1 or heads, rows, columns], or None: ask it."""

    first: int
    last: int
    hidden: Tensor | None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Consecutive queries of consecutive heads that look at the same few runs of keys, all read as slices.

    The heads are whole groups, `groups` of them, or lie within one. `place` is where the first row stands, and
    `empties` says that the pattern may show some rows nothing.
    """

    heads: slice
    groups: slice
    rows: slice
    runs: tuple[slice, ...]
    partial: tuple[Partial, ...]
    place: int
    empties: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and keys."""
        return _length(self.heads), _length(self.rows), sum(map(_length, self.runs))

    def queries(self, x: Tensor) -> Tensor:
        """Rows of x [b, h, q, d], the heads of a group below each other: [b g, r q, d]."""
        return x[:, self.heads, self.rows].reshape(len(x) * _length(self.groups), -1, x.shape[-1])

    def keys(self, x: Tensor) -> list[Tensor]:
        """Runs of x [b, g, k, d], each [b g, columns, d]."""
        return [x[:, self.groups, run].flatten(0, 1) for run in self.runs]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The columns of x [b g, r q, keys] by run."""
        return x.split([_length(run) for run in self.runs], dim=2)

    def put(self, out: Tensor, piece: Tensor) -> None:
        """Writes rows [b g, r q, f] to out [b, h, q, f]."""
        heads, rows, _ = self.shape
        out[:, self.heads, self.rows] = piece.view(len(out), heads, rows, -1)

    def add(self, total: Tensor, run: int, piece: Tensor) -> None:
        """Adds what belongs to a run of keys, [b g, columns, d], to total [b, g, k, d]."""
        total[:, self.groups, self.runs[run]].add_(piece.unflatten(0, (len(total), -1)))

    def places(self, device: torch.device) -> tuple[Place, Place]:
        """Where queries and keys stand, over [heads, rows, keys]."""
        head = torch.arange(self.heads.start, self.heads.stop, device=device)[:, None, None]
        row = torch.arange(self.place, self.place + _length(self.rows), device=device)[None, :, None]
        column = torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])
        return Place(row, head), Place(column[None, None], head)

    def hide(self, scores: Tensor, scope: Scope, lowest: float) -> bool:
        """Overwrites the scores [b, heads, rows, keys] of what may not be looked at; whether rows may be empty."""
        for first, last, hidden in self.partial:
            if hidden is None:
                query, key = self.places(scores.device)
                row, column = (scope.place(index, query.head) for index in (query.index, key.index[..., first:last]))
                hidden = ~scope.pattern.sees(row, column)
            scores[..., first:last].masked_fill_(hidden, lowest)
        if scope.pattern_alone:
            return self.empties
        first = 0
        for run in self.runs:
            columns = scores[..., first : first + _length(run)]
            for visible in self._masks(scope, run):
                columns.masked_fill_(~visible, lowest)
            first += _length(run)
        return True

    def _masks(self, scope: Scope, run: slice) -> Iterator[Tensor]:
        """What the caller's masks show of a run of keys, each to broadcast to [b, heads, rows, columns]."""
        if scope.key_mask is not None:
            yield scope.key_mask[:, None, None, run]
        if scope.documents is not None:
            own = scope.documents[:, self.place : self.place + _length(self.rows)]
            yield own[:, None, :, None] == scope.documents[:, None, None, run]
        if scope.mask is not None:
            wanted = zip((self.heads, self.rows, run), scope.mask.shape[1:], strict=True)
            yield scope.mask[(slice(None), *(cut if size > 1 else slice(None) for cut, size in wanted))]


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Tiles of queries, [i], that touch m blocks of keys each, [i, m], wherever these lie.

    Tensors are read in whole tiles and blocks of `size` tokens, the last ones filled up. `offset` is the place of the
    first query. `partial` names the (i, m) that the pattern shows in part only, and `hidden` [n or 1, 1, tile, block]
    what it hides there, or None: ask it.
    """

    head: Tensor
    group: Tensor
    tiles: Tensor
    blocks: Tensor
    partial: tuple[Tensor, Tensor]
    hidden: Tensor | None
    size: tuple[int, int]
    offset: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tiles, rows and keys."""
        tile, block = self.size
        return len(self.tiles), tile, self.blocks.shape[1] * block

    def queries(self, x: Tensor) -> Tensor:
        """Tiles of x [b, h, q, d], each of one head: [b i, tile, d]."""
        tiles = x.unflatten(2, (-1, self.size[0]))
        index = self.head * tiles.shape[2] + self.tiles
        return tiles.flatten(1, 2).index_select(1, index).flatten(0, 1)

    def keys(self, x: Tensor) -> list[Tensor]:
        """All blocks of x [b, g, k, d] behind each other, as one run: [b i, m block, d]."""
        blocks = x.unflatten(2, (-1, self.size[1])).flatten(1, 2)
        return [
            blocks.index_select(1, self._numbers(x)).unflatten(1, (len(self.tiles), -1)).flatten(2, 3).flatten(0, 1)
        ]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The columns of x [b i, tile, keys], all one run."""
        return [x]

    def put(self, out: Tensor, piece: Tensor) -> None:
        """Writes tiles [b i, tile, f] to out [b, h, q, f]."""
        out.unflatten(2, (-1, self.size[0]))[:, self.head, self.tiles] = piece.unflatten(0, (len(out), -1)).to(
            out.dtype
        )

    def add(self, total: Tensor, run: int, piece: Tensor) -> None:
        """Adds what belongs to the blocks, [b i, m block, d], to total [b, g, k, d]."""
        blocks = total.unflatten(2, (-1, self.size[1])).flatten(1, 2)
        more = piece.unflatten(1, (-1, self.size[1])).unflatten(0, (len(total), -1)).flatten(1, 2)
        blocks.index_add_(1, self._numbers(total), more)

    def places(self, device: torch.device) -> tuple[Place, Place]:
        """Where queries and keys stand, over [tiles, rows, keys]; past the end where the last ones are filled up."""
        head = self.head[:, None, None]
        row = (self.offset + self.tiles * self.size[0])[:, None, None] + torch.arange(self.size[0], device=device)[
            :, None
        ]
        column = (self.blocks * self.size[1])[..., None] + torch.arange(self.size[1], device=device)
        return Place(row, head), Place(column.flatten(1)[:, None], head)

    def hide(self, scores: Tensor, scope: Scope, lowest: float) -> bool:
        """Overwrites the scores [b, tiles, rows, keys] of what may not be looked at; whether rows may be empty."""
        item, slot = self.partial
        if len(item):
            blocks = scores.unflatten(3, (-1, self.size[1]))
            found = blocks[:, item, :, slot]  # torch puts the chosen items in front: [n b rows block]
            hidden = self.hidden_by(scope.pattern, scope.key_length, scope) if self.hidden is None else self.hidden
            blocks[:, item, :, slot] = found.masked_fill_(hidden, lowest)
        if not scope.pattern_alone:
            query, key = self.places(scores.device)
            last = scope.key_length - 1
            inside = (dataclasses.replace(place, index=place.index.clamp(max=last)) for place in (query, key))
            everything = torch.ones((), dtype=torch.bool, device=scores.device)
            scores.masked_fill_(~scope.less(everything, *inside), lowest)
        return len(item) > 0 or not scope.pattern_alone

    def hidden_by(self, pattern: Pattern, key_length: int, scope: Scope | None = None) -> Tensor:
        """What a pattern hides in the blocks that it shows in part, [n, 1 or b, rows, block]."""
        item, slot = self.partial
        query, key = self.places(item.device)
        row, column = query.index[item], key.index.unflatten(2, (-1, self.size[1]))[item, :, slot]
        last, head = key_length - 1, query.head[item]
        place = Place if scope is None else scope.place
        seen = pattern.sees(*(place(index.clamp(max=last), head) for index in (row, column)))
        seen = seen & (row <= last) & (column <= last)  # no token stands where tiles and blocks are filled up
        return ~(seen[:, None] if seen.dim() == 3 else seen.transpose(0, 1))

    def _numbers(self, x: Tensor) -> Tensor:
        """The blocks of all items, counted over all key-value heads of x."""
        return (self.group[:, None] * (x.shape[2] // self.size[1]) + self.blocks).flatten()


def _length(cut: slice) -> int:
    return cut.stop - cut.start


Part = Rows | Gathered
