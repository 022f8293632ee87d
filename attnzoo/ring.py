"""Where a cache stores entries: the first tokens in front, then the last ones, a new one in the place of the oldest."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Entries = Mapping[str, Tensor]  # what is stored for tokens, by name, each [b, g, t, d]


class Kept(NamedTuple):
    """The entries that a call looks at, its own among them; the token that each stands for, None for all tokens in
    their order; and whether some are missing."""

    entries: Entries
    tokens: Tensor | None = None
    gaps: bool = False


class Ring:
    """The entries of the first `first` tokens and of the last `last` ones.

    Marked tokens that leave the ring are moved behind those in front. No order is kept among the last ones: softmax
    needs none, and `tokens` says which token a row holds.

    Args:
        entries: the shape [heads, features] of each named tensor that is stored for a token.
        drops: whether there will be more tokens than these.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[int, int]],
        batch_size: int,
        first: int,
        last: int,
        drops: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.first, self.last, self.drops = first, last, drops
        self.length = 0  # of all tokens ever appended
        self.marks: list[int] = []  # marked tokens among the last ones
        self.moved: list[int] = []  # those that have been moved
        self.front = self.start = first  # rows before the ring, and the token that its first row was laid for
        with torch.inference_mode(False):  # buffers born in inference mode could never be written outside it
            self.entries = {
                name: torch.zeros(batch_size, heads, first + last, features, dtype=dtype, device=device)
                for name, (heads, features) in entries.items()
            }
            self.tokens = torch.arange(first + last, device=device)

    @property
    def oldest(self) -> int:
        """The first of the last tokens that can be relied on: a call that failed may have written the next one."""
        return max(self.start, self.length + 1 - self.last) if self.drops else self.start

    def read(self, new: Entries) -> Kept:
        """What a call looks at, its own entries among it; they count only after `append`, so that a call that fails
        changes nothing."""
        if self.length == 0:
            return Kept(new)
        if self._in_place(new):
            stop = self.length + _length(new)
            self._write(new)
            rows = self.front + min(stop - self.start, self.last)
            entries = {name: self.entries[name][:, :, :rows].to(tensor.dtype) for name, tensor in new.items()}
            return Kept(entries, self.tokens[:rows], max(self.start, stop - self.last) > self.first)
        held, tokens = self._in_order(new)
        entries = {name: torch.cat([held[name], tensor], dim=2) for name, tensor in new.items()}
        return Kept(entries, tokens, True) if self.oldest > self.first else Kept(entries)

    def append(self, new: Entries, marked: list[int]) -> None:
        """Stores the entries of a call; `marked` tokens are never dropped."""
        stop = self.length + _length(new)
        oldest = max(self.start, stop + 1 - self.last)
        marks = sorted({*self.marks, *(token for token in marked if token >= self.oldest)}) if self.drops else []
        leaving = [token for token in marks if self.first <= token < oldest]
        if leaving:
            held, tokens = self._in_order(new)
            stored = {name: torch.cat([held[name], tensor], dim=2) for name, tensor in new.items()}
            self.moved = sorted({*self.moved, *leaving})
            self._lay(stored, tokens, oldest, stop)
        elif self.length == 0 or not self._in_place(new):
            self._write(new)
        self.marks = [token for token in marks if token >= max(oldest, self.first)]
        self.length = stop

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens, all of whose last ones must still be held."""
        if length <= self.first:
            self._restart()
        elif self.oldest > self.start:
            self._lay(*self._in_order(self.entries), self.oldest, length)
        self.marks = [token for token in self.marks if token < length]
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Puts the sequences in another order."""
        with torch.inference_mode(False), torch.no_grad():
            self.entries = {name: stored.index_select(0, index) for name, stored in self.entries.items()}

    def _in_place(self, new: Entries) -> bool:
        """Whether entries can be stored before they are looked at: neither a gradient nor a query needs what was
        there."""
        queries = _length(new)
        return not torch.is_grad_enabled() and (queries == 1 or self.length + queries - self.start <= self.last)

    @torch.no_grad()
    def _write(self, new: Entries) -> None:
        queries = _length(new)
        stop, row = self.length + queries, self.front + self.length - self.start
        if stop - self.start <= self.last:
            for name, tensor in new.items():
                self.entries[name][:, :, row : row + queries] = tensor
        elif queries == 1:
            row = self.front + (self.length - self.start) % self.last
            for name, tensor in new.items():
                self.entries[name][:, :, row : row + 1] = tensor
            self.tokens[row] = self.length
        else:
            front = self._range(self.length, min(self.start, stop))
            ring = self._range(max(self.length, self.start, stop - self.last), stop)
            tokens, rows = torch.cat([front, ring]), torch.cat([front, self._row(ring)])
            for name, tensor in new.items():
                self.entries[name][:, :, rows] = tensor[:, :, tokens - self.length].to(self.entries[name].dtype)
            self.tokens[rows] = tokens

    def _in_order(self, new: Entries) -> tuple[dict[str, Tensor], Tensor]:
        """The entries that are held, in the dtypes of new ones, and all tokens with the new ones at their end."""
        rows: slice | Tensor = slice(self.front + self.length - self.start)
        if self.oldest > self.start:
            rows = torch.cat([self._range(0, self.front), self._row(self._range(self.oldest, self.length))])
        entries = {name: self.entries[name][:, :, rows].to(tensor.dtype) for name, tensor in new.items()}
        return entries, torch.cat([self.tokens[rows], self._range(self.length, self.length + _length(new))])

    @torch.no_grad()
    def _lay(self, entries: Entries, tokens: Tensor, oldest: int, stop: int) -> None:
        """Stores anew: of these entries the first and the moved tokens, and those from `oldest` to `stop`."""
        front = [*range(self.first), *self.moved]
        wanted = torch.cat([torch.tensor(front, dtype=torch.long, device=tokens.device), self._range(oldest, stop)])
        columns = torch.searchsorted(tokens, wanted)
        with torch.inference_mode(False), torch.no_grad():  # the first turns gradients on again
            for name, stored in self.entries.items():
                rows = stored.new_zeros(*stored.shape[:2], len(front) + self.last, stored.shape[3])
                rows[:, :, : len(wanted)] = entries[name].index_select(2, columns)
                self.entries[name] = rows
            self.tokens = torch.cat([wanted[: len(front)], self._range(oldest, oldest + self.last)])
        self.front, self.start = len(front), oldest

    def _restart(self) -> None:
        """Lays the rows as they were at the start."""
        rows = self.first + self.last
        with torch.inference_mode(False), torch.no_grad():
            if self.moved:
                self.entries = {name: stored[:, :, :rows].clone() for name, stored in self.entries.items()}
            self.tokens = self._range(0, rows)
        self.front = self.start = self.first
        self.moved = []

    def _row(self, tokens: Tensor) -> Tensor:
        """Where tokens of the ring are stored."""
        return self.front + (tokens - self.start) % self.last

    def _range(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, max(start, stop), device=self.tokens.device)


def _length(entries: Entries) -> int:
    return next(iter(entries.values())).shape[2]
