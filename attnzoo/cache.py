"""Keys and values already read, so that decoding does not read them again."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.errors import CacheError
from attnzoo.options import whole
from attnzoo.patterns import Past
from attnzoo.ring import Entries, Kept, Ring


class Piece(NamedTuple):
    """What a call appends: the entries of its tokens, and what it says about all tokens [b, length + q]."""

    entries: Entries
    key_mask: Tensor | None
    marked: Tensor | None


class Cache:
    """The entries of up to `max_length` tokens, for the attention that made it.

    Where the pattern needs only a part of what came before, only that is kept. `length` counts every token appended
    since `reset()`. Made by `Attention.new_cache`; a cache serves one layer and one batch.

    Args:
        entries: the shape [heads, features] of each named tensor that is stored for a token.
        past: what the pattern needs of what came before.
        rewind: how many tokens `crop` must be able to take back.
    Raises:
        OptionError: batch_size or max_length is no whole number of at least 1.
    Cost: batch_size * the tokens kept * the entries' size, taken at once, and batch_size * max_length bytes once a call
        has hidden tokens; `nbytes` has the sum.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[int, int]],
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        past: Past = Past(),  # noqa: B008 (a frozen value)
        rewind: int = 0,
    ) -> None:
        self.batch_size = whole("batch_size", batch_size)
        self.max_length = whole("max_length", max_length)
        self.rewind = whole("rewind", rewind, least=0)
        self.past = past
        last = max_length if past.last is None else max(past.last, 1) + rewind
        drops = past.first + last < max_length
        first, last = (past.first, last) if drops else (0, max_length)
        self._ring = Ring(entries, batch_size, first, last, drops, dtype, device)
        self._hidden: Tensor | None = None  # [b, max_length], once a call has hidden some

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self._ring.length

    @property
    def nbytes(self) -> int:
        """The bytes this cache holds, used or not."""
        hidden = 0 if self._hidden is None else self._hidden.nbytes
        return sum(stored.nbytes for stored in self._ring.entries.values()) + self._ring.tokens.nbytes + hidden

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that entries are stored in."""
        return next(iter(self._ring.entries.values())).dtype

    def check(self, batch: int, queries: int, past: Past) -> None:
        """Refuses tokens that do not fit, and a pattern that needs more, before anything changes."""
        if batch != self.batch_size:
            raise CacheError(f"the cache was made for batch_size={self.batch_size}, and the call has {batch} sequences")
        if self.length + queries > self.max_length:
            raise CacheError(
                f"the cache holds {self.length} of max_length={self.max_length} tokens, and {queries} more do not fit: "
                f"make one with max_length={self.length + queries} or more, or crop() it"
            )
        if self._ring.drops and not past.within(self.past):
            raise CacheError("the cache was made by an attention that looks less far back: use one that this one makes")

    def check_marked(self, marked: Tensor) -> None:
        """Refuses marks that ask for tokens which were dropped; `marked` is [b, length + q]."""
        ring = self._ring
        if ring.oldest == ring.first:
            return
        told = _tokens(marked)
        lost = [token for token in told if ring.first <= token < ring.oldest and token not in ring.moved]
        late = [token for token in told if token >= self.length and self.past.mutual]
        if lost or late:
            why = "was dropped before" if lost else "would look at tokens that were dropped"
            raise CacheError(
                f"token {(lost or late)[0]} is marked now and {why}: mark tokens in the first piece, or make the "
                f"cache with rewind={self.max_length}, which drops none"
            )

    def joined_mask(self, key_mask: Tensor | None, queries: int) -> Tensor | None:
        """The key mask [b, length + q] of a call: a token hidden when it was appended stays hidden."""
        if self._hidden is None:
            return key_mask
        seen = ~self._hidden[:, : self.length + queries]
        return seen if key_mask is None else seen & key_mask

    def extended(self, new: Entries) -> Kept:
        """What a call looks at, its own new entries among it.

        Raises:
            CacheError: the new entries have other heads, or a dtype that the cache could not hold without loss.
        """
        for name, tensor in new.items():
            stored = self._ring.entries.get(name)
            if stored is None or stored.shape[1::2] != tensor.shape[1::2]:
                size = list(tensor.shape[1::2])
                raise CacheError(f"the cache was made by an attention with other heads: it has no '{name}' of {size}")
            if stored.dtype != tensor.dtype and torch.promote_types(stored.dtype, tensor.dtype) != stored.dtype:
                kinds = f"{stored.dtype} and the call makes {tensor.dtype}"
                raise CacheError(f"the cache holds {kinds}: make the cache where it is used")
        return self._ring.read(new)

    def commit(self, piece: Piece) -> None:
        """Counts the tokens that a call appended."""
        start = self.length
        self._ring.append(piece.entries, [] if piece.marked is None else _tokens(piece.marked))
        if piece.key_mask is not None and self._hidden is None:
            with torch.inference_mode(False):
                shape = self.batch_size, self.max_length
                self._hidden = torch.zeros(shape, dtype=torch.bool, device=piece.key_mask.device)
        if self._hidden is not None:
            hidden = False if piece.key_mask is None else ~piece.key_mask[:, start:]
            self._hidden[:, start : self.length] = hidden

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        Raises:
            CacheError: there are not that many, or the window of the last of them has been dropped.
        """
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise CacheError(f"crop wants a length from 0 to the {self.length} tokens read, not {length!r}")
        ring = self._ring
        least = ring.oldest + ring.last - self.rewind - 1  # the next token looks at all but rewind and one of the ring
        if ring.oldest > ring.first and ring.first < length < least:
            raise CacheError(
                f"crop({length}) of {self.length} tokens leaves a window of which {least - length} have been dropped: "
                f"a cache made with rewind={self.rewind + least - length} would still have them"
            )
        ring.crop(length)
        if self._hidden is not None:
            self._hidden[:, length:] = False

    def reset(self) -> None:
        """Forgets everything."""
        self.crop(0)
        self._hidden = None

    def reorder(self, index: Tensor) -> None:
        """Puts the sequences in another order, as beam search asks: sequence i becomes what sequence index[i] was.

        Raises:
            CacheError: index is no 1-D tensor of whole numbers below batch_size.
        """
        whole_numbers = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int32, torch.int64)
        if not whole_numbers or not bool(((index >= 0) & (index < self.batch_size)).all()):
            raise CacheError(f"reorder wants a 1-D tensor of whole numbers below {self.batch_size}, not {index!r}")
        self._ring.reorder(index)
        with torch.inference_mode(False), torch.no_grad():
            self._hidden = None if self._hidden is None else self._hidden.index_select(0, index)
        self.batch_size = len(index)


def _tokens(marked: Tensor) -> list[int]:
    """The tokens that are marked in any sequence."""
    found: list[int] = marked.any(0).nonzero().flatten().tolist()
    return found
