"""What every variant is: project, open a scope, attend, merge the heads, project out."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnzoo.cache import Cache, Piece
from attnzoo.errors import CacheError, InputError, NotSupportedError, OptionError
from attnzoo.formulas import formula_of
from attnzoo.kernels.dense import dense, dense_weights, without_autocast
from attnzoo.kernels.fastest import fastest
from attnzoo.options import choice, share, whole
from attnzoo.patterns import Causal, Full, Pattern
from attnzoo.positions import count_visible, rotate, turns
from attnzoo.projections import Projection
from attnzoo.ring import Kept
from attnzoo.scope import Scope, check_documents, check_key_mask, check_marked, check_mask, places
from attnzoo.scores import Alibi, Score

PositionKind = Literal["none", "rotary", "alibi"]


class Attention(nn.Module):
    """An attention over what its pattern lets each token see.

    A variant gives its projection and pattern to the constructor and overrides `attend`. Where visibility depends
    on content it overrides `visible_for` as well; where weights are another softmax or none, `weights_for`; where the
    output is no mean of values by these weights, `expected`.

    Args:
        projection: how tokens become queries, keys and values, and heads become tokens.
        pattern: which query may look at which key.
        causal: hides all that comes later, on top of the pattern.
        dropout: the share of weights dropped in training.
        positions: "rotary" turns queries and keys, "alibi" takes distance off the scores, "none" does neither.
        score: a term added to the scores, instead of ALiBi.
    Raises:
        OptionError: dropout is no share, or rotary positions meet an odd head_dim.
    """

    examples: ClassVar[Sequence[dict[str, Any]]] = ({},)
    without: ClassVar[frozenset[str]] = frozenset()  # features that a variant declares to do without
    out_proj: nn.Linear
    salt: Tensor | None = None
    """What a pattern that is drawn anew depends on, below 2**32: processes that train one model set it to the same
    number before each step. None: each call takes a number from torch's generator."""

    def __init__(
        self,
        projection: Projection,
        pattern: Pattern,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        positions: PositionKind = "none",
        score: Score | None = None,
    ) -> None:
        super().__init__()
        self.projection = projection
        if not _is_value(pattern):
            raise OptionError(f"pattern must be a value that can be hashed, as a frozen dataclass is, not {pattern!r}")
        if causal and pattern.decodes and not pattern.causal:
            raise OptionError(f"{pattern} hides all later tokens but marked ones: causal=True would hide those too")
        self.pattern = pattern & Causal() if causal and not pattern.causal else pattern
        if self.pattern.decodes and not self.pattern.causal:
            self.without = self.without | {"causal"}  # type: ignore[misc]
        self.formula = formula_of(self.pattern)
        self.dropout = share("dropout", dropout)
        self.positions = choice("positions", positions, ("none", "rotary", "alibi"))
        if positions == "rotary" and projection.head_dim % 2:
            raise OptionError(f"rotary positions need an even head_dim, not {projection.head_dim}: use other num_heads")
        if positions == "alibi" and score is not None:
            raise OptionError("positions='alibi' is a score term of its own: leave out either that or score")
        self.score = Alibi(projection.num_heads) if positions == "alibi" else score
        for name, layer in projection.layers().items():
            self.add_module(name, layer)
        self.register_load_state_dict_pre_hook(_adapt_state)
        self.supports = self._supported() - self.without

    @property
    def d_model(self) -> int:
        return self.projection.d_model

    @property
    def num_heads(self) -> int:
        return self.projection.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.projection.groups

    @property
    def head_dim(self) -> int:
        return self.projection.head_dim

    @property
    def causal(self) -> bool:
        return self.pattern.causal

    # What a variant may override

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        """The heads [b, h, q, f] from q [b, h, q, d], k [b, g, k, d], v [b, g, k, f].

        With the cache of a window, keys may have gaps: `scope.key` says where each stands.
        """
        return dense(q, k, v, scope)

    def visible_for(self, q: Tensor, k: Tensor, scope: Scope) -> Tensor:
        """What these queries may look at among these keys, a bool mask that broadcasts to [b, h, q, k]."""
        return scope.visible()

    def weights_for(self, q: Tensor, k: Tensor, scope: Scope) -> Tensor:
        """The weight [b, h, q, k] of these keys for these queries, without dropout."""
        return dense_weights(q, k, scope, self.visible_for(q, k, scope))

    def expected(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        """What `attend` must give, as plainly as it can be said; the contract compares the two in float64."""
        weights = self.weights_for(q, k, scope)
        return weights @ v.to(weights.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    @property
    def redraws(self) -> bool:
        """Whether the next call draws a pattern that nobody can know before."""
        return False

    def current_pattern(self) -> Pattern:
        """The pattern of the next call, where it depends on training or eval."""
        return self.pattern

    # What a user calls

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, values: Tensor | None = None,
        key_mask: Tensor | None = None, mask: Tensor | None = None, documents: Tensor | None = None,
        marked: Tensor | None = None, cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens [b, q, e] to tokens [b, q, e].

        Args:
            context: tokens [b, k, e] that keys and values come from, instead of x.
            values: tokens [b, k, e] that values come from, instead of context.
            key_mask: [b, k], True = a real token; hidden tokens cannot be felt, whatever they hold.
            mask: [q, k], or 4-D and broadcasting to [b, h, q, k], True = may look.
            documents: [b, k], whole numbers; only equal ones see each other, and their positions start anew.
            marked: [b, k], True = a token that the pattern treats specially, as `Marked` does.
            cache: keys and values read before; the call appends its own, so checkpointing must not run it twice.
        Raises:
            InputError: x, context or values have no shape [b, t, e].
            MaskError: a mask has a dtype or shape without meaning.
            CacheError: the cache is full or made for something else; it is left as it was.
            NotSupportedError: the variant declares that it does without.
        """
        q, k, v, scope, piece = self._open(x, context, values, key_mask, mask, documents, marked, cache)
        with without_autocast(q):
            heads = self.attend(q, k, v, scope)
        y = self.projection.output(self, heads)
        if cache is not None:
            cache.commit(piece)
        return y

    def weights(
        self, x: Tensor, context: Tensor | None = None, *,
        key_mask: Tensor | None = None, mask: Tensor | None = None, documents: Tensor | None = None,
        marked: Tensor | None = None, heads: Sequence[int] | None = None, queries: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The attention weights [b, h, q, k] of chosen heads and queries, or all, computed densely without dropout.

        Raises:
            InputError: a head or a query is not there.
            NotSupportedError: the next call draws a new pattern, or the output is no weighted mean of values.
        """
        self._fixed_pattern()
        if "weights" not in self.supports:
            raise NotSupportedError(f"{type(self).__name__} has mathematics of its own, without weights to show")
        q, k, _, scope, _ = self._open(x, context, None, key_mask, mask, documents, marked, None)
        head = _chosen("heads", heads, self.num_heads, q.device)
        query = _chosen("queries", queries, x.shape[1], q.device)
        q, k = q[:, head][:, :, query], k[:, head // (self.num_heads // self.num_kv_heads)]
        scope = scope.narrowed(head, query)
        with without_autocast(q):
            return self.weights_for(q, k, scope).to(q.dtype)

    def visible(self, query_length: int, key_length: int | None = None, *, marked: Tensor | None = None) -> Tensor:
        """What the pattern promises without any padding: bool [1 or h, q, k].

        Args:
            marked: [b, k], the marked tokens of each sequence; then the result is [b, 1 or h, q, k].
        Raises:
            NotSupportedError: the next call draws a new pattern.
        """
        key_length = query_length if key_length is None else key_length
        for name, length in (("query_length", query_length), ("key_length", key_length)):
            whole(name, length, least=0)
        if marked is not None:
            marked = check_marked(marked, len(marked), query_length, key_length)
        return self._fixed_pattern().visible(query_length, key_length, self.num_heads, marked)

    def density(self, length: int) -> float:
        """The share of pairs that the pattern lets see each other, in training, over sequences of this length."""
        return self.pattern.density(whole("length", length, least=0), self.num_heads)

    def draw(self, length: int = 16, head: int = 0) -> str:
        """The pattern as text, a row for each query."""
        _chosen("head", [head], self.num_heads, torch.device("cpu"))
        return self.pattern.draw(whole("length", length, least=0), head)

    def new_cache(self, batch_size: int, max_length: int, rewind: int = 0) -> Cache:
        """An empty cache for decoding with this attention.

        Where the pattern looks back a bounded way it keeps the first tokens that all see, the window, `rewind` more,
        and tokens that were marked; else all tokens.

        Args:
            rewind: how many tokens `crop` must be able to take back; a cache of all tokens can take back any
                number.
        Raises:
            NotSupportedError: the attention looks ahead, so that what was read before would have to change.
        """
        self._check_decodes()
        whole("rewind", rewind, least=0)
        parameter = next(self.parameters())
        device = parameter.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else parameter.dtype
        past = (self.pattern | self.current_pattern()).past
        return Cache(self.projection.stored, batch_size, max_length, dtype, device, past, rewind)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, pattern={self.pattern}, positions={self.positions}"
        )

    # How a call is opened

    def _open(
        self, x: Tensor, context: Tensor | None, values: Tensor | None,
        key_mask: Tensor | None, mask: Tensor | None, documents: Tensor | None, marked: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Scope, Piece]:  # fmt: skip
        """Checks everything, hides padding and projects: q, k, v, the scope, and what a cache shall append."""
        self._check_tokens("x", x)
        crossed = context is not None or values is not None
        context = x if context is None else context
        values = context if values is None else values
        if crossed:
            self._check_tokens("context", context, batch=x.shape[0])
            self._check_tokens("values", values, batch=x.shape[0], length=context.shape[1])
        self._check_supported(crossed, cache, documents, marked)
        batch, queries = x.shape[:2]
        pattern = self.current_pattern()
        before = 0 if cache is None else cache.length
        if cache is not None:
            cache.check(batch, queries, pattern.past)
        keys = before + context.shape[1]
        key_mask = check_key_mask(key_mask, batch, keys)
        mask = check_mask(mask, batch, self.num_heads, queries, keys)
        documents = check_documents(documents, batch, queries, keys)
        marked = check_marked(marked, batch, queries, keys)
        if marked is not None and before and not self.causal and bool(marked[:, before:].any()):
            raise CacheError(
                "tokens read before would have looked at tokens marked now: read all marked tokens in the first piece"
            )
        if marked is not None and cache is not None:
            cache.check_marked(marked)

        own = None if key_mask is None else key_mask[:, before:]
        if crossed:
            q = self.projection.queries(self, _hide(x, own) if context is x else x)
            entries = self.projection.entries(self, _hide(context, own), _hide(values, own))
        else:
            q, entries = self.projection.self_entries(self, _hide(x, own))
        joined = key_mask if cache is None else cache.joined_mask(key_mask, queries)
        if self.positions == "rotary":
            positions = count_visible(keys, joined, documents, x.device, before)
            turn = turns(positions, self.head_dim, q.dtype)
            q, entries["keys"] = (rotate(x, *turn) for x in (q, entries["keys"]))
        kept = Kept(entries) if cache is None else cache.extended(entries)
        k, v = self.projection.keys_values(self, kept.entries)
        salt = self._salt().to(x.device) if self.redraws else None
        query, key = places(self.num_heads, queries, keys, x.device, marked, salt, kept.tokens)
        dropout = self.dropout if self.training else 0.0
        formula = self.formula if pattern is self.pattern else ""
        scope = Scope(
            pattern, query, key, joined, mask, documents, marked, self.score, dropout, formula=formula, gaps=kept.gaps
        )
        return q, k, v, scope, Piece(entries, key_mask, marked)

    def _salt(self) -> Tensor:
        return torch.randint(2**32, (), device="cpu") if self.salt is None else self.salt

    def _check_tokens(self, name: str, tokens: Tensor, batch: int | None = None, length: int | None = None) -> None:
        wanted = (batch, length, self.d_model)
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else ()
        fits = len(shape) == 3 and all(want is None or want == size for want, size in zip(wanted, shape, strict=True))
        if not fits:
            names = ["batch" if batch is None else str(batch), "length" if length is None else str(length)]
            got = list(shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError(
                f"{name} must be [batch, length, d_model] = [{', '.join(names)}, {self.d_model}], not {got}"
            )
        if not tokens.is_floating_point():
            raise InputError(f"{name} must hold floating-point features, not {tokens.dtype}: embed token ids first")

    def _check_supported(
        self, crossed: bool, cache: Cache | None, documents: Tensor | None, marked: Tensor | None
    ) -> None:
        if torch.compiler.is_exporting() and "export" not in self.supports:
            raise NotSupportedError(f"{self._label} can't be exported")
        if cache is not None:
            if not isinstance(cache, Cache):
                raise CacheError(f"a cache comes from new_cache(), not from {type(cache).__name__}")
            if crossed:
                raise NotSupportedError("a cache reads one sequence: give a cache or context and values, not both")
            self._check_decodes()
        if crossed and "cross" not in self.supports:
            raise NotSupportedError(
                f"{self._label} knows positions, and context has others: use Full() without positions"
            )
        if documents is not None and "documents" not in self.supports:
            raise NotSupportedError(
                f"{self._label} knows places of the whole sequence, so that documents can't start anew"
            )
        if marked is not None and "marked" not in self.supports:
            raise NotSupportedError(f"{self._label} treats no token specially: give it a pattern with Marked()")

    def _check_decodes(self) -> None:
        if "cache" not in self.supports:
            raise NotSupportedError(f"{self._label} can't decode with a cache: build it with causal=True")

    def _fixed_pattern(self) -> Pattern:
        if self.redraws:
            raise NotSupportedError("redraw=True draws a new pattern at each training step: ask in eval mode")
        return self.current_pattern()

    def _supported(self) -> set[str]:
        """What follows from pattern, positions and the methods that a variant overrides."""
        found = {"causal" if self.causal else "bidirectional", "right_padding", "length_free", "compile", "export"}
        kind, names = type(self), ("weights", "weights_for")
        if kind.expected is Attention.expected or any(getattr(kind, n) is not getattr(Attention, n) for n in names):
            found.add("weights")
        if self.pattern.marks:
            found.add("marked")
        if self.pattern == Full() and self.positions == "none":
            found.add("cross")
        if self.pattern.relative:
            found |= {"documents", "left_padding"}
        return found | {"cache"} if self.pattern.decodes else found

    @property
    def _label(self) -> str:
        return f"{type(self).__name__} with pattern {self.pattern} and positions={self.positions!r}"


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = Full(), *,  # noqa: B008 (a frozen value)
    key_mask: Tensor | None = None, mask: Tensor | None = None, documents: Tensor | None = None,
    marked: Tensor | None = None, score: Score | None = None, dropout: float = 0.0, block: int = 64,
) -> Tensor:  # fmt: skip
    """Attention of q [b, h, q, d] over k [b, g, k, d] and v [b, g, k, f], without projections: [b, h, q, f].

    Full and causal patterns go through torch's fused attention, all others through blocks of `block` keys.

    Args:
        key_mask: [b, k], True = a real token; what hidden keys and values hold cannot be felt. Hidden queries are
            computed as they are: zero them first where they may hold NaN.
        mask: [q, k], or 4-D and broadcasting to [b, h, q, k], True = may look.
        documents: [b, k], whole numbers; only equal ones see each other.
        marked: [b, k], True = a token that the pattern treats specially, as `Marked` does.
        dropout: the share of weights dropped; leave it at 0 outside training.
    Raises:
        InputError: the shapes do not fit each other.
        MaskError: a mask has a dtype or shape without meaning.
        NotSupportedError: documents meet a pattern that is tied to places of the whole sequence.
    """
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in (q, k, v)):
        raise InputError("q, k and v must be 4-D: [batch, heads, length, features]")
    (batch, heads, queries, features), (groups, keys) = q.shape, k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != features or v.shape[:3] != k.shape[:3] or groups == 0 or heads % groups:
        raise InputError(
            f"q [b, h, q, d], k [b, g, k, d] and v [b, g, k, f] must agree, and g divide h: "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not isinstance(pattern, Pattern) or not _is_value(pattern):
        raise InputError(
            f"pattern must be a pattern, such as Local(128) & Causal(), that can be hashed: not {pattern!r}"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise InputError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if marked is not None and not pattern.marks:
        raise NotSupportedError(f"{pattern} treats no token specially: join Marked() to it")
    if documents is not None and not pattern.relative:
        raise NotSupportedError(f"{pattern} knows places of the whole sequence, so that documents can't start anew")
    if queries > keys and pattern != Full():
        raise InputError(
            f"{pattern} stands queries at the end of the keys, and {queries} queries do not fit into {keys} keys"
        )
    key_mask = check_key_mask(key_mask, batch, keys)
    marked = check_marked(marked, batch, queries, keys)
    query, key = places(heads, queries, keys, q.device, marked)
    mask, documents = check_mask(mask, batch, heads, queries, keys), check_documents(documents, batch, queries, keys)
    scope = Scope(pattern, query, key, key_mask, mask, documents, marked, score, share("dropout", dropout))
    if key_mask is not None:
        k, v = (tensor.masked_fill(~key_mask[:, None, :, None], 0) for tensor in (k, v))
    with without_autocast(q):
        return fastest(q, k, v, scope, whole("block", block))


def _is_value(pattern: Pattern) -> bool:
    """Whether a pattern can be told by its value, as what is computed once for it has to be."""
    try:
        hash(pattern)
    except TypeError:
        return False
    return True


def _hide(tokens: Tensor, key_mask: Tensor | None) -> Tensor:
    return tokens if key_mask is None else tokens.masked_fill(~key_mask[:, :, None], 0)


def _chosen(name: str, chosen: Iterable[Any] | None, count: int, device: torch.device) -> Tensor:
    if chosen is None:
        return torch.arange(count, device=device)
    try:
        listed = chosen.tolist() if isinstance(chosen, Tensor) else list(chosen)
        numbers = [] if any(isinstance(number, bool) for number in listed) else [operator.index(n) for n in listed]
    except TypeError:
        numbers = []
    if not numbers or not all(-count <= number < count for number in numbers):
        raise InputError(f"{name} must be whole numbers, at least one and all below {count}, not {chosen!r}")
    return torch.tensor(numbers, device=device) % count


def _adapt_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(module, Attention)
    module.projection.adapt(state, prefix)
