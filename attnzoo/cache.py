"""Keys and values already read, so that decoding does not read them again."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attnzoo.errors import CacheError
from attnzoo.options import whole


class Cache:
    """The entries of up to `max_length` tokens, for the attention that made it.

    `length` counts every token appended since `reset()`. Made by `Attention.new_cache`; a cache serves one layer
    and one batch.

    Args:
        entries: the shape [heads, features] of each named tensor that is stored for a token.
    Raises:
        OptionError: batch_size or max_length is no whole number of at least 1.
    Cost: batch_size * max_length * the entries' size, taken at once; `nbytes` has the sum.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[int, int]],
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch_size = whole("batch_size", batch_size)
        self.max_length = whole("max_length", max_length)
        self.length = 0
        with torch.inference_mode(False):  # buffers born in inference mode could never be written outside it
            self._entries = {
                name: torch.zeros(batch_size, heads, max_length, features, dtype=dtype, device=device)
                for name, (heads, features) in entries.items()
            }
            self._visible = torch.ones(batch_size, max_length, dtype=torch.bool, device=device)
        self._hides = False  # no token hidden so far: then no mask is needed

    @property
    def nbytes(self) -> int:
        """The bytes this cache holds, used or not."""
        return sum(tensor.nbytes for tensor in (*self._entries.values(), self._visible))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that entries are stored in."""
        return next(iter(self._entries.values())).dtype

    def check(self, batch: int, queries: int) -> None:
        """Refuses tokens that do not fit, before anything changes."""
        if batch != self.batch_size:
            raise CacheError(f"the cache was made for batch_size={self.batch_size}, and the call has {batch} sequences")
        if self.length + queries > self.max_length:
            raise CacheError(
                f"the cache holds {self.length} of max_length={self.max_length} tokens, and {queries} more do not fit: "
                f"make one with max_length={self.length + queries} or more, or crop() it"
            )

    def joined_mask(self, key_mask: Tensor | None, queries: int) -> Tensor | None:
        """The key mask [b, length + q] of a call: a token hidden when it was appended stays hidden."""
        if not self._hides:
            return key_mask
        seen = self._visible[:, : self.length + queries].clone()
        seen[:, self.length :] = True
        return seen if key_mask is None else seen & key_mask

    def extended(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All entries with new ones at their end; they count only after `commit`, so that a call that fails changes
        nothing.

        Raises:
            CacheError: the new entries have other heads, or a dtype that the cache could not hold without loss.
        """
        for name, tensor in new.items():
            stored = self._entries.get(name)
            if stored is None or stored.shape[1::2] != tensor.shape[1::2]:
                size = list(tensor.shape[1::2])
                raise CacheError(f"the cache was made by an attention with other heads: it has no '{name}' of {size}")
            if torch.promote_types(stored.dtype, tensor.dtype) != stored.dtype:
                kinds = f"{stored.dtype} and the call makes {tensor.dtype}"
                raise CacheError(f"the cache holds {kinds}: make the cache where it is used")
        return {name: self._extended(self._entries[name], tensor) for name, tensor in new.items()}

    def _extended(self, stored: Tensor, tensor: Tensor) -> Tensor:
        stop = self.length + tensor.shape[2]
        with torch.no_grad():
            stored[:, :, self.length : stop] = tensor
        if torch.is_grad_enabled():  # own keys keep their gradient, and backward must find earlier ones unchanged
            return torch.cat([stored[:, :, : self.length].to(tensor.dtype), tensor], dim=2)
        return stored[:, :, :stop].to(tensor.dtype)

    def commit(self, key_mask: Tensor | None, queries: int) -> None:
        """Counts the tokens that `extended` wrote; `key_mask` is that of the call, [b, length + q]."""
        stop = self.length + queries
        self._visible[:, self.length : stop] = True if key_mask is None else key_mask[:, self.length :]
        self._hides = self._hides or key_mask is not None
        self.length = stop

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        Raises:
            CacheError: there are not that many.
        """
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise CacheError(f"crop wants a length from 0 to the {self.length} tokens held, not {length!r}")
        self.length = length

    def reset(self) -> None:
        """Forgets everything."""
        self.length, self._hides = 0, False

    def reorder(self, index: Tensor) -> None:
        """Puts the sequences in another order, as beam search asks: sequence i becomes what sequence index[i] was.

        Raises:
            CacheError: index is no 1-D tensor of whole numbers below batch_size.
        """
        whole_numbers = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int32, torch.int64)
        if not whole_numbers or not bool(((index >= 0) & (index < self.batch_size)).all()):
            raise CacheError(f"reorder wants a 1-D tensor of whole numbers below {self.batch_size}, not {index!r}")
        with torch.inference_mode(False):
            self._entries = {name: stored.index_select(0, index) for name, stored in self._entries.items()}
            self._visible = self._visible.index_select(0, index)
        self.batch_size = len(index)
