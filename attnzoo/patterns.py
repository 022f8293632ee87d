"""Which query may look at which key: predicates on two places, combined with `&` and `|`.

A pattern is a frozen value without tensors. It prints as a formula, `parse` reads the formula back, and equal
patterns compare equal. All patterns are prefix-stable: the mask of a short sequence is the corner of the mask of a
longer one, which is what makes caching right.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.errors import OptionError
from attnzoo.options import whole
from attnzoo.shapes import Place, Span


class Past(NamedTuple):
    """What a query may look at of all tokens up to itself while none is marked: the first ones, and the last ones."""

    first: int = 0
    last: int | None = None  # the query is one of them; None where it may be any token
    exact: bool = False  # does it see all of these?
    mutual: bool = False  # may a marked query look at more?

    @property
    def most(self) -> float:
        """The highest number of tokens that this can be."""
        return math.inf if self.last is None else self.first + self.last

    def within(self, other: "Past") -> bool:
        """Whether another covers this, marked queries left out."""
        last = math.inf if self.last is None else self.last
        return self.first <= other.first and (other.last is None or last <= other.last)

    @property
    def everything(self) -> bool:
        """Whether a query sees all that came before."""
        return self.last is None and self.exact


class Pattern:
    """What each query may look at; a subclass is a frozen dataclass that defines `sees`."""

    relative = False  # does it know distances only, so that shifting the sequence changes nothing?
    per_head = False  # do heads see different keys?
    causal = False  # does it hide everything that comes later?
    marks = False  # does it treat marked tokens specially?
    past = Past()  # what can it need of what came before? A cache keeps no more; by default it keeps all

    @property
    def decodes(self) -> bool:
        """Whether all that is seen of later tokens is marked ones: then a cache can hold what was read before."""
        return self.causal

    def sees(self, query: Place, key: Place) -> Tensor:
        """Whether each query may look at each key, over index tensors that broadcast against each other."""
        raise NotImplementedError(f"{type(self).__name__} must define sees(query, key)")

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        """Whether any query of a run may look at any key of another; True is always right, only slower."""
        return torch.ones_like(queries.first + keys.first + head, dtype=torch.bool)

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        """Whether each query of a run may look at each key of another; False is always right, only slower."""
        return torch.zeros_like(queries.first + keys.first + head, dtype=torch.bool)

    def visible(
        self, query_length: int, key_length: int | None = None, num_heads: int = 1, marked: Tensor | None = None
    ) -> Tensor:
        """The whole pattern as a bool mask [1 or h, q, k]; queries stand at the end of the keys.

        Args:
            marked: [b, k], which tokens are marked in each sequence; then the mask is [b, 1 or h, q, k].
        """
        key_length = query_length if key_length is None else key_length
        heads = num_heads if self.per_head else 1
        device = None if marked is None else marked.device
        query = torch.arange(key_length - query_length, key_length, device=device)[:, None]
        key, head = torch.arange(key_length, device=device), torch.arange(heads, device=device)[:, None, None]
        if marked is None:
            return self.sees(Place(query, head), Place(key, head)).expand(heads, query_length, key_length)
        rows, columns = marked[:, None, key_length - query_length :, None], marked[:, None, None]
        seen = self.sees(Place(query, head, rows), Place(key, head, columns))
        return seen.expand(len(marked), heads, query_length, key_length)

    def density(self, length: int, num_heads: int = 1) -> float:
        """The share of the length x length pairs that may be looked at, as the mean over heads."""
        key = torch.arange(length)
        seen = 0
        for head in range(num_heads if self.per_head else 1):
            place = Place(key, torch.tensor(head))
            for rows in key.split(512):
                whole_rows = torch.ones(len(rows), length, dtype=torch.bool)
                seen += int((self.sees(Place(rows[:, None], place.head), place) & whole_rows).sum())
        return seen / (length * length * (num_heads if self.per_head else 1)) if length else 0.0

    def draw(self, length: int = 8, head: int = 0, marked: Collection[int] = ()) -> str:
        """The pattern as text: a row for each query, `#` where it may look; `marked` tokens by their places."""
        marks = torch.tensor([[token in marked for token in range(length)]], dtype=torch.bool)
        rows = self.visible(length, num_heads=head + 1, marked=marks)[0, head if self.per_head else 0].tolist()
        return "\n".join(" ".join("#" if seen else "." for seen in row) for row in rows)

    def __and__(self, other: "Pattern") -> "Pattern":
        """What both let a query see."""
        if not isinstance(other, Pattern):
            return NotImplemented
        if isinstance(other, Both):  # one shape for a chain, so that equal formulas are equal values
            return self & other.left & other.right
        if isinstance(self, Full) or self == other:
            return other
        return self if isinstance(other, Full) else Both(self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        """What either lets a query see."""
        if not isinstance(other, Pattern):
            return NotImplemented
        if isinstance(other, Either):
            return self | other.left | other.right
        if isinstance(self, Full) or self == other:
            return self
        return other if isinstance(other, Full) else Either(self, other)

    def __str__(self) -> str:
        """The formula, which `parse` reads back."""
        fields: list[Any] = list(dataclasses.fields(self))  # type: ignore[arg-type]
        words: list[str] = []
        for place, field in enumerate(fields):
            value = getattr(self, field.name)
            if value != field.default:
                named = field.kw_only or not len(words) == place == 0
                words.append(f"{field.name}={value!r}" if named else repr(value))
        return f"{type(self).__name__}({', '.join(words)})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, repr=False)
class Full(Pattern):
    """Everything sees everything.

    >>> print(Full().draw(8))
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    """

    relative = True
    past = Past(exact=True)

    def sees(self, query: Place, key: Place) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=key.index.device)

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return self.touches(queries, keys, head)


@dataclasses.dataclass(frozen=True, repr=False)
class Causal(Pattern):
    """A query sees itself and what came before it.

    >>> print(Causal().draw(8))
    # . . . . . . .
    # # . . . . . .
    # # # . . . . .
    # # # # . . . .
    # # # # # . . .
    # # # # # # . .
    # # # # # # # .
    # # # # # # # #
    """

    relative = True
    causal = True
    past = Past(exact=True)

    def sees(self, query: Place, key: Place) -> Tensor:
        return key.index <= query.index

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return keys.first <= queries.last

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return keys.last <= queries.first


@dataclasses.dataclass(frozen=True, repr=False)
class Local(Pattern):
    """A query sees `radius` tokens to each side and itself; in blocks, its own block and `radius` blocks to each side.

    Source: Beltagy et al. 2020, section 3.1, arXiv:2004.05150; the paper's window w is 2 * radius.

    >>> print(Local(2).draw(8))
    # # # . . . . .
    # # # # . . . .
    # # # # # . . .
    . # # # # # . .
    . . # # # # # .
    . . . # # # # #
    . . . . # # # #
    . . . . . # # #
    >>> print(Local(1, block=2).draw(8))
    # # # # . . . .
    # # # # . . . .
    # # # # # # . .
    # # # # # # . .
    . . # # # # # #
    . . # # # # # #
    . . . . # # # #
    . . . . # # # #
    """

    radius: int
    block: int = 1

    def __post_init__(self) -> None:
        whole("radius", self.radius, least=0)
        whole("block", self.block)

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.block == 1

    @property
    def past(self) -> Past:  # type: ignore[override]
        return Past(last=(self.radius + 1) * self.block, exact=self.block == 1)

    def sees(self, query: Place, key: Place) -> Tensor:
        if self.block == 1:
            return (query.index - key.index).abs() <= self.radius
        return (query.index // self.block - key.index // self.block).abs() <= self.radius

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        before = queries.first // self.block - keys.last // self.block
        after = keys.first // self.block - queries.last // self.block
        return (before <= self.radius) & (after <= self.radius)

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        before = queries.last // self.block - keys.first // self.block
        after = keys.last // self.block - queries.first // self.block
        return (before <= self.radius) & (after <= self.radius)


@dataclasses.dataclass(frozen=True, repr=False)
class Global(Pattern):
    """The first `tokens` tokens see everything and are seen by everything; with `block`, the first `tokens` blocks
    of that size.

    Source: Beltagy et al. 2020, section 3.1, arXiv:2004.05150; Zaheer et al. 2020 (ITC), section 2,
        arXiv:2007.14062.

    >>> print(Global(2).draw(8))
    # # # # # # # #
    # # # # # # # #
    # # . . . . . .
    # # . . . . . .
    # # . . . . . .
    # # . . . . . .
    # # . . . . . .
    # # . . . . . .
    >>> print(Global(1, block=3).draw(8))
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # . . . . .
    # # # . . . . .
    # # # . . . . .
    # # # . . . . .
    # # # . . . . .
    """

    tokens: int
    block: int = 1

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, least=0)
        whole("block", self.block)

    @property
    def past(self) -> Past:  # type: ignore[override]
        return Past(first=self.tokens * self.block, last=0, exact=True)

    def sees(self, query: Place, key: Place) -> Tensor:
        return (query.index < self.tokens * self.block) | (key.index < self.tokens * self.block)

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return (queries.first < self.tokens * self.block) | (keys.first < self.tokens * self.block)

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return (queries.last < self.tokens * self.block) | (keys.last < self.tokens * self.block)


@dataclasses.dataclass(frozen=True, repr=False)
class Marked(Pattern):
    """Marked tokens are seen by everything, and with `mutual` see everything too; a call says which are marked.

    `Causal() | Marked()` is a prefix model, its prefix marked; `Local(64) | Marked(mutual=True)` has global tokens
    where each sequence wants them.

    Source: Raffel et al. 2020, section 3.2.1 (prefix), arXiv:1910.10683; Beltagy et al. 2020, section 3.1 (global),
        arXiv:2004.05150.

    >>> print((Causal() | Marked()).draw(6, marked=[0, 1, 4]))
    # # . . # .
    # # . . # .
    # # # . # .
    # # # # # .
    # # # # # .
    # # # # # #
    >>> print((Local(0) | Marked(mutual=True)).draw(6, marked=[0, 4]))
    # # # # # #
    # # . . # .
    # . # . # .
    # . . # # .
    # # # # # #
    # . . . # #
    """

    mutual: bool = dataclasses.field(default=False, kw_only=True)

    relative = True
    marks = True

    def __post_init__(self) -> None:
        if not isinstance(self.mutual, bool):
            raise OptionError(f"mutual must be True or False, not {self.mutual!r}")

    @property
    def decodes(self) -> bool:
        return not self.mutual

    @property
    def past(self) -> Past:  # type: ignore[override]
        return Past(last=0, exact=True, mutual=self.mutual)

    def sees(self, query: Place, key: Place) -> Tensor:
        if query.marked is None or key.marked is None:
            return torch.zeros((), dtype=torch.bool, device=key.index.device)
        return query.marked | key.marked if self.mutual else key.marked

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        if queries.marked is None or keys.marked is None:
            return torch.zeros_like(super().touches(queries, keys, head))
        return queries.marked | keys.marked if self.mutual else keys.marked


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Heads(Pattern):
    """The named heads see everything, the others nothing: `Heads(0, 1) | Local(64)` mixes two full heads with local
    ones.

    >>> print(Heads(0).draw(8, head=0))
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    # # # # # # # #
    >>> print(Heads(0).draw(2, head=1))
    . .
    . .
    """

    heads: tuple[int, ...]

    relative = True
    per_head = True

    def __init__(self, *heads: int) -> None:
        object.__setattr__(self, "heads", tuple(sorted({whole("head", head, least=0) for head in heads})))

    def sees(self, query: Place, key: Place) -> Tensor:
        seen = query.head < 0
        for head in self.heads:  # one comparison each, which a FlexAttention kernel can hold
            seen = seen | (query.head == head)
        return seen

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return self.sees(Place(queries.first, head), Place(keys.first, head))

    covers = touches

    def __str__(self) -> str:
        return f"Heads({', '.join(map(str, self.heads))})"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, repr=False)
class Random(Pattern):
    """Each block sees itself and `draws` blocks before it, drawn at random for each head; seeing is mutual.

    The c candidates of block i are the blocks `first` ... i - 1 - `near`: those that a window of `near` blocks and
    `first` global blocks leave. They are cut into `draws` even stretches and a hash of (seed, i, stretch, head)
    takes one from each, so min(c, draws) distinct ones. Where `share` stands instead of `draws`, that share of the
    candidates (rounded up) is drawn. As seeing is mutual, a row has about 2 * `draws` blocks on average, early ones
    more; `& Causal()` leaves `draws` and the block itself.

    Source: Zaheer et al. 2020, section 2, arXiv:2007.14062, which draws from all blocks and for a fixed length;
        here the draw depends on nothing that comes later, so that it is the same at every length.

    >>> print(Random(1, block=2, seed=1).draw(8))
    # # # # . . . .
    # # # # . . . .
    # # # # # # # #
    # # # # # # # #
    . . # # # # . .
    . . # # # # . .
    . . # # . . # #
    . . # # . . # #
    """

    draws: int | None = None
    block: int = 1
    seed: int = 0
    near: int = 0
    first: int = 0
    share: float | None = None

    per_head = True

    def __post_init__(self) -> None:
        if (self.draws is None) == (self.share is None):
            raise OptionError("Random wants either draws, the blocks that a block draws, or share, their part of all")
        if self.draws is not None:
            whole("draws", self.draws)
        elif isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise OptionError(f"share must be a number in (0, 1], not {self.share!r}")
        whole("block", self.block)
        whole("near", self.near, least=0)
        whole("first", self.first, least=0)
        if whole("seed", self.seed, least=0, most=2**63) > _LOW_32:
            raise OptionError(f"seed must be below 2**32, not {self.seed}")

    def sees(self, query: Place, key: Place) -> Tensor:
        query_block, key_block = query.index // self.block, key.index // self.block
        row = torch.maximum(query_block, key_block)
        candidate = torch.minimum(query_block, key_block) - self.first
        count = (row - self.near - self.first).clamp(min=0)
        draws = self._draws(count)
        stretch = ((candidate + 1) * draws - 1) // count.clamp(min=1)
        start, stop = stretch * count // draws, (stretch + 1) * count // draws
        drawn = start + _hash(self.seed, query.salt, row, stretch, query.head) % (stop - start).clamp(min=1)
        return (query_block == key_block) | ((candidate >= 0) & (candidate < count) & (candidate == drawn))

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        longest = max(int((span.last - span.first).max()) + 1 for span in (queries, keys))
        if longest > self.block:  # runs hold many small blocks, and so many draws that nearly every pair of runs meets
            return super().touches(queries, keys, head)
        within = [bool((span.first // self.block == span.last // self.block).all()) for span in (queries, keys)]
        rows, columns = (  # of the two blocks that a run can lie in, or the one
            (span.first,) if inside else (span.first, span.last)
            for span, inside in zip((queries, keys), within, strict=True)
        )
        corners = [
            self.sees(Place(query, head, salt=queries.salt), Place(key, head)) for query in rows for key in columns
        ]
        return torch.stack(corners).any(0)

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        within = [span.first // self.block == span.last // self.block for span in (queries, keys)]
        if not (within[0].any() and within[1].any()):
            return super().covers(queries, keys, head)
        query = Place(queries.first, head, salt=queries.salt)
        return within[0] & within[1] & self.sees(query, Place(keys.first, head))

    def _draws(self, count: Tensor) -> Tensor:
        if self.share is None:
            return torch.full_like(count, self.draws or 0)
        millionths = round(self.share * 1_000_000)  # whole numbers: the same draw on every machine
        return ((count * millionths + 999_999) // 1_000_000).clamp(min=1)


@dataclasses.dataclass(frozen=True, repr=False)
class Pair(Pattern):
    """Two patterns joined into one: the base of `a & b` and `a | b`."""

    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        object.__setattr__(self, "past", self._past())  # asked for each token that is decoded

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        raise NotImplementedError

    def _past(self) -> Past:
        raise NotImplementedError

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative and self.right.relative

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        return self.left.per_head or self.right.per_head

    @property
    def marks(self) -> bool:  # type: ignore[override]
        return self.left.marks or self.right.marks

    def sees(self, query: Place, key: Place) -> Tensor:
        return self.join(self.left.sees(query, key), self.right.sees(query, key))

    def touches(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return self.join(self.left.touches(queries, keys, head), self.right.touches(queries, keys, head))

    def covers(self, queries: Span, keys: Span, head: Tensor) -> Tensor:
        return self.join(self.left.covers(queries, keys, head), self.right.covers(queries, keys, head))


class Both(Pair):
    """What two patterns both allow; written `a & b`."""

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        return left & right

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.left.causal or self.right.causal

    @property
    def decodes(self) -> bool:
        return self.left.decodes or self.right.decodes

    def _past(self) -> Past:
        less, more = sorted((self.left.past, self.right.past), key=lambda past: past.most)
        return less._replace(exact=less.exact and more.everything, mutual=less.mutual or more.mutual)

    def __str__(self) -> str:
        return " & ".join(f"({side})" if isinstance(side, Either) else str(side) for side in (self.left, self.right))

    __repr__ = __str__


class Either(Pair):
    """What at least one of two patterns allows; written `a | b`."""

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        return left | right

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.left.causal and self.right.causal

    @property
    def decodes(self) -> bool:
        return self.left.decodes and self.right.decodes

    def _past(self) -> Past:
        left, right = self.left.past, self.right.past
        last = None if left.last is None or right.last is None else max(left.last, right.last)
        exact, mutual = left.exact and right.exact, left.mutual or right.mutual
        return Past(max(left.first, right.first), last, exact, mutual)

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"

    __repr__ = __str__


_LOW_32 = 0xFFFFFFFF


def _mix(value: Tensor) -> Tensor:
    """Scrambles 32 bits; the factor has 27, so that no product leaves 63."""
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _LOW_32
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _LOW_32
    return value ^ (value >> 16)


def _hash(seed: int, salt: Tensor | None, *numbers: Tensor) -> Tensor:
    """A 32-bit hash of whole numbers, the same on every device, rank and run; salt is below 2**32."""
    state = _mix(torch.full_like(numbers[0], seed))
    for number in numbers if salt is None else (salt, *numbers):
        state = _mix((state + number * 0x1F3D5B79 + 1) & _LOW_32)  # exact for numbers below 2**34
    return state
