"""What one call may look at: pattern and masks joined in one place, with score and dropout for the kernel."""

import dataclasses

import torch
from torch import Tensor

from attnzoo.errors import MaskError
from attnzoo.patterns import Pattern
from attnzoo.scores import Score
from attnzoo.shapes import Place

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Scope:
    """The facts of one call, handed to its kernel.

    `query` and `key` are the places of all queries and keys, over [h, q, k]. `key_mask`, `documents` and `marked` are
    [b, t], by the token of the sequence that a place stands at; `mask` is 4-D and broadcasts to [b, h, q, t]; all have
    been checked. `gaps` says that the keys are not all tokens in their order, but those that a cache has kept.
    `dropout` is 0 outside training.
    `formula` is the pattern's, where it is known: compiled graphs hold text and no patterns.
    """

    pattern: Pattern
    query: Place
    key: Place
    key_mask: Tensor | None = None
    mask: Tensor | None = None
    documents: Tensor | None = None
    marked: Tensor | None = None
    score: Score | None = None
    dropout: float = 0.0
    formula: str = ""
    gaps: bool = False

    @property
    def query_length(self) -> int:
        return self.query.index.shape[1]

    @property
    def key_length(self) -> int:
        return self.key.index.shape[2]

    @property
    def pattern_alone(self) -> bool:
        """Whether the pattern is all that limits what may be looked at."""
        return self.key_mask is None and self.mask is None and self.documents is None

    @property
    def own_pattern(self) -> bool:
        """Whether marks or a salt make the pattern this call's alone, so that nothing of it can be remembered."""
        return self.marked is not None or self.query.salt is not None

    @property
    def all_visible(self) -> bool:
        """Whether this is one query, which may look at every key; where it is not plain to see the answer is False."""
        past = self.pattern.past
        return self.query_length <= 1 and self.pattern_alone and past.exact and self.key_length <= past.most

    def visible(self) -> Tensor:
        """What may be looked at, as a bool mask that broadcasts to [b, h, q, k]."""
        mask = self.mask
        if mask is not None and self.gaps and mask.shape[-1] > 1:
            mask = mask[..., self.key.index[0, 0]]
        seen = self._less(self.pattern.sees(self.query, self.key), self.query, self.key, mask)
        return seen[(None,) * (4 - seen.dim())]

    def place(self, index: Tensor, head: Tensor) -> Place:
        """The place of chosen tokens, with what this call says about them."""
        return Place(index, head, None if self.marked is None else self.marked[:, index], self.query.salt)

    def less(self, seen: Tensor, query: Place, key: Place) -> Tensor:
        """What the masks leave of what the pattern lets see at chosen places of one 3-D shape; the batch in front."""
        mask = self.mask
        if mask is not None:
            offset = self.key_length - self.query_length
            axes = zip((query.head, query.index - offset, key.index), mask.shape[1:], strict=True)
            head, row, column = (axis if size > 1 else torch.zeros_like(axis) for axis, size in axes)
            mask = mask[:, head, row, column]
        return self._less(seen, query, key, mask)

    def narrowed(self, heads: Tensor, queries: Tensor) -> "Scope":
        """The scope of chosen heads and queries alone."""
        marked = None if self.query.marked is None else self.query.marked[:, :, queries]
        query = dataclasses.replace(
            self.query, index=self.query.index[:, queries], head=self.query.head[heads], marked=marked
        )
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask[:, heads]
            mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        return dataclasses.replace(self, query=query, key=dataclasses.replace(self.key, head=query.head), mask=mask)

    def sequences(self, chosen: slice) -> "Scope":
        """The scope of some sequences of the batch, for kernels that make places themselves."""
        names = ("key_mask", "mask", "documents", "marked")
        tensors = ((name, getattr(self, name)) for name in names)
        cut = {name: tensor[chosen] for name, tensor in tensors if tensor is not None and len(tensor) > 1}
        return dataclasses.replace(self, **cut)

    def _less(self, seen: Tensor, query: Place, key: Place, mask: Tensor | None) -> Tensor:
        if self.key_mask is not None:
            seen = seen & self.key_mask[:, key.index]
        if self.documents is not None:
            seen = seen & (self.documents[:, query.index] == self.documents[:, key.index])
        return seen if mask is None else seen & mask


def places(
    num_heads: int, query_length: int, key_length: int, device: torch.device,
    marked: Tensor | None = None, salt: Tensor | None = None, kept: Tensor | None = None,
) -> tuple[Place, Place]:  # fmt: skip
    """Where queries and keys stand, over [h, q, k]: query i of q at position i + (k - q).

    Args:
        kept: the tokens [k] that keys stand for, where they are not all tokens in their order.
    """
    head = torch.arange(num_heads, device=device)[:, None, None]
    query = torch.arange(key_length - query_length, key_length, device=device)[None, :, None]
    key = (torch.arange(key_length, device=device) if kept is None else kept)[None, None]
    if marked is None:
        return Place(query, head, None, salt), Place(key, head, None, salt)
    rows, columns = marked[:, None, key_length - query_length :, None], marked if kept is None else marked[:, kept]
    return Place(query, head, rows, salt), Place(key, head, columns[:, None, None], salt)


def check_key_mask(key_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """The key mask as bool, [b, k], True = a real token."""
    return None if key_mask is None else _by_token("key_mask", key_mask, batch, keys)


def check_marked(marked: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """The marked tokens as bool, [b, k]."""
    if marked is not None and queries > keys:
        raise MaskError(f"marked says which queries are marked, and {queries} queries have only {keys} of them")
    return None if marked is None else _by_token("marked", marked, batch, keys)


def _by_token(name: str, mask: Tensor, batch: int, keys: int) -> Tensor:
    mask = _as_bool(name, mask)
    if mask.shape != (batch, keys):
        raise MaskError(f"{name} must be [batch, keys] = [{batch}, {keys}], not {list(mask.shape)}")
    return mask


def check_mask(mask: Tensor | None, batch: int, heads: int, queries: int, keys: int) -> Tensor | None:
    """The mask as bool in four dimensions that broadcast to [b, h, q, k], True = may look."""
    if mask is None:
        return None
    mask = _as_bool("mask", mask)
    full = (batch, heads, queries, keys)
    if mask.shape == full[2:]:
        return mask[None, None]
    if mask.dim() == 4 and all(size in (1, wanted) for size, wanted in zip(mask.shape, full, strict=True)):
        return mask
    raise MaskError(
        f"mask must be [queries, keys] = [{queries}, {keys}], or 4-D and broadcast to [b, h, q, k] = {list(full)}, "
        f"not {list(mask.shape)}; a key_mask [batch, keys] hides tokens"
    )


def check_documents(documents: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """The document of each token, [b, k], whole numbers."""
    if documents is None:
        return None
    if not isinstance(documents, Tensor) or documents.dtype not in WHOLE:
        raise MaskError(f"documents must be a tensor of whole numbers, one id a token, not {_kind(documents)}")
    if documents.shape != (batch, keys):
        raise MaskError(f"documents must be [batch, keys] = [{batch}, {keys}], not {list(documents.shape)}")
    if queries > keys:
        raise MaskError(
            f"documents say where each query belongs, and {queries} queries have only {keys} of them: use a mask"
        )
    return documents


def _as_bool(name: str, mask: Tensor) -> Tensor:
    """Bool masks, and integer masks as tokenizers give them (non-zero = True)."""
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *WHOLE):
        raise MaskError(f"{name} must be bool, True = may look (or whole numbers, non-zero = True), not {_kind(mask)}")
    return mask if mask.dtype == torch.bool else mask != 0


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
