"""What is right: a variant's own definition, and attention written anew with nothing of the core's but the projections.

The second shares no kernel, no scope, no score and no positions with what it judges, so that a fault in these can't
hide in it.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.scope import Scope
from attnzoo.testing.foreign import Foreign, NotTaken, bare, has_usual_layers, without_hidden

Oracle = Callable[..., Tensor]


def oracles(attn: Attention) -> list[tuple[str, Oracle]]:
    """Every way to compute what a call must give, each with its name."""
    found: list[tuple[str, Oracle]] = []
    if not isinstance(attn, Foreign) or hasattr(attn.module, "expected"):
        found.append(("its definition `expected`", definition(attn)))
    if is_plain(attn) and not attn.redraws:
        found.append(("softmax over what `visible` shows", functools.partial(plain, attn)))
    return found


def plainly(attn: Attention) -> Oracle:
    """The one of them that shares the least with it."""
    return oracles(attn)[-1][1]


def is_plain(attn: Attention) -> bool:
    """Whether `visible` and softmax say all about a variant: nothing depends on content or is other mathematics."""
    kind = type(attn)
    own_score = attn.score is not None and attn.positions != "alibi"
    overrides = any(getattr(kind, n) is not getattr(Attention, n) for n in ("expected", "visible_for", "weights_for"))
    return has_usual_layers(attn) and not own_score and (isinstance(attn, Foreign) or not overrides)


def definition(attn: Attention) -> Oracle:
    """The same attention on the same parameters, computing `expected` where it would `attend`."""
    if isinstance(attn, Foreign):
        return attn.expected if hasattr(attn.module, "expected") else functools.partial(plain, attn)
    twin = copy.copy(attn)
    twin.attend = twin.expected  # type: ignore[method-assign]
    return twin


def rounded_definition(attn: Attention) -> Oracle:
    """The definition in float64 of queries, keys and values that have been rounded to the module's dtype."""
    if isinstance(attn, Foreign):
        return definition(attn)
    twin = copy.copy(attn)

    def attend(q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        return twin.expected(q.double(), k.double(), v.double(), scope).to(v.dtype)

    twin.attend = attend  # type: ignore[method-assign]
    return twin


def plain(attn: Attention, x: Tensor, *sources: Tensor, **given: Any) -> Tensor:
    """Dense attention over the visible keys, in the dtype of x with softmax in float32 at least."""
    weights, v = plain_weights(attn, x, *sources, **given)
    y = project_out(attn, (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))
    crossed = dict(zip(("context",), sources, strict=False))
    return without_hidden(y, **given, **crossed) if isinstance(attn, Foreign) else y


def plain_weights(
    attn: Attention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    values: Tensor | None = None,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    marked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights [b, h, q, k], and what they weigh: the values of every query head [b, h, k, f]."""
    crossed = context is not None or values is not None
    context = x if context is None else context
    values = context if values is None else values
    if key_mask is not None:
        hidden = (key_mask == 0)[:, :, None]
        context, values = context.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        x = x if crossed else context
    heads, groups = attn.num_heads, attn.num_kv_heads
    group = [head // (heads // groups) for head in range(heads)]
    q, k, v = _projected(attn, x, context, values)
    q, k, v = _cut(q, heads), _cut(k, groups)[:, group], _cut(v, groups)[:, group]
    if attn.positions == "rotary":
        place = _positions(k, key_mask, documents)
        q, k = _turned(q, place), _turned(k, place)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.einsum("bhqd,bhkd->bhqk", q.to(wide), k.to(wide)) / attn.head_dim**0.5
    if attn.positions == "alibi":
        scores = scores - _alibi(heads, q.shape[2], k.shape[2]).to(wide)
    seen = may_look(attn, q.shape[0], q.shape[2], k.shape[2], key_mask, mask, documents, marked)
    scores = scores.where(seen, -torch.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.where(highest.isfinite(), 0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1), v  # a query that may look at nothing gets zero


def project_out(attn: Attention, joined: Tensor) -> Tensor:
    """The output projection alone, of joined heads [b, q, e]."""
    return bare(attn).out_proj(joined)


def output_of_nothing(attn: Attention, x: Tensor, key_mask: Tensor | None = None, **_: Tensor) -> Tensor:
    """What queries that see nothing must give: the output projection of zero."""
    if has_usual_layers(attn):
        zero = project_out(attn, torch.zeros_like(x))
    else:
        if isinstance(attn, Foreign) and "mask" not in attn.takes:
            raise NotTaken("its forward takes no mask, and nothing else says what a query gets that sees nothing")
        nothing = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        zero = rounded_definition(attn)(torch.zeros_like(x), mask=nothing)
    return without_hidden(zero, key_mask) if isinstance(attn, Foreign) else zero


def may_look(
    attn: Attention,
    batch: int,
    queries: int,
    keys: int,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    marked: Tensor | None = None,
) -> Tensor:
    """Pattern and key_mask and mask and documents, as bool [b, h, q, k]; queries stand at the end of the keys."""
    seen = attn.visible(queries, keys)[None] if marked is None else attn.visible(queries, keys, marked=marked != 0)
    seen = seen.expand(batch, attn.num_heads, queries, keys)
    if key_mask is not None:
        seen = seen & (key_mask != 0)[:, None, None, :]
    if mask is not None:
        seen = seen & (mask != 0)  # [q, k] and 4-D alike broadcast from the right
    if documents is not None:
        seen = seen & (documents[:, None, -queries:, None] == documents[:, None, None, :])
    return seen


def _projected(attn: Attention, x: Tensor, context: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layers = bare(attn)
    if not hasattr(layers, "qkv_proj"):
        return layers.q_proj(x), layers.k_proj(context), layers.v_proj(values)
    narrow = attn.num_kv_heads * attn.head_dim
    rows = [attn.d_model, narrow, narrow]
    q, k, v = (layers.qkv_proj(tokens).split(rows, dim=-1)[part] for part, tokens in enumerate((x, context, values)))
    return q, k, v


def _cut(projected: Tensor, heads: int) -> Tensor:
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _positions(k: Tensor, key_mask: Tensor | None, documents: Tensor | None) -> Tensor:
    """How many visible tokens of the same document come before each token, [b, k]."""
    batch, _, keys, _ = k.shape
    counts = torch.ones(keys, keys, dtype=torch.bool).tril(-1).expand(batch, keys, keys)
    if key_mask is not None:
        counts = counts & (key_mask != 0)[:, None, :]
    if documents is not None:
        counts = counts & (documents[:, :, None] == documents[:, None, :])
    return counts.sum(-1)


def _turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings as complex numbers: features i and i + d/2, turned by position * 10000 ** (-2 i / d)."""
    half = heads.shape[-1] // 2
    wide = torch.promote_types(heads.dtype, torch.float32)
    angle = positions[:, None, :, None] * 10_000.0 ** (torch.arange(half, dtype=wide) * -2 / heads.shape[-1])
    turned = torch.complex(heads[..., :half].to(wide), heads[..., half:].to(wide)) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


def _alibi(heads: int, queries: int, keys: int) -> Tensor:
    """What ALiBi takes off the scores, [h, q, k]."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)][: heads - power]
    distance = (torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)).abs()
    return torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
