"""That the numbers are right and nothing leaks: promises 7 and 8."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from attnzoo.attention import Attention
from attnzoo.testing.maker import Maker, dtype_of
from attnzoo.testing.probes import (
    DTYPES,
    Masks,
    NotApplicable,
    agree,
    askable,
    compare,
    compare_gradients,
    differ,
    documents_of,
    gradients,
    named,
    need,
    noise,
    same,
    seeded,
    some,
    takes,
    tokens,
)
from attnzoo.testing.reference import is_plain, plain_weights
from attnzoo.testing.size import size


def check_output_is_what_the_pattern_says(make: Maker) -> None:
    """The output equals dense float64 attention over the visible keys, in eval and in training, with positions that
    count as they should beside padding."""
    masks: list[Masks] = [{}, *({"key_mask": some(size.batch, size.length, seed=2, share=part)} for part in (0.3, 0.8))]
    masks = [given for given in masks if all(takes(make(), name) for name in given)]
    outputs = []
    for positions in make.positions:
        for training in (False, True):
            attn = make(positions=positions, training=training)
            for given in masks:
                what = f"positions={positions!r}, {'training' if training else 'eval'}, {named(given)}"
                compare(attn, what, tokens(attn), every=True, **given)
        outputs.append(attn.eval()(tokens(attn)))
        others = attn.visible(size.length) & ~torch.eye(size.length, dtype=torch.bool)
        if positions != "none" and others.any():  # who sees itself alone has no distances
            differ(outputs[-1], outputs[0], f"positions={positions!r}, against none")


def check_gradients_are_those_of_the_pattern(make: Maker) -> None:
    """The gradients of inputs and parameters equal those of dense float64 attention over the visible keys."""
    for positions in make.positions:
        for given in (
            {},
            {"key_mask": some(size.batch, size.length, seed=2), "mask": some(size.length, size.length, seed=3)},
        ):
            attn = make(positions=positions, training=True)
            given = askable(attn, **given)
            what = f"positions={positions!r}, with {' and '.join(given) or 'no masks'}"
            compare_gradients(attn, what, {"x": tokens(attn)}, **given)


def check_cross_attention(make: Maker) -> None:
    """Keys come from a context and values from it or a third place, of any length; output and gradients are right."""
    attn = make()
    need(attn, "cross")
    sizes = [(size.length, size.context), (1, size.context), (size.length, size.length)]
    if "causal" not in attn.supports:
        sizes += [(size.context, size.length), (size.context, 1)]
    for queries, keys in sizes:
        x, context, values = tokens(attn, queries), tokens(attn, keys, seed=6), tokens(attn, keys, seed=7)
        key_mask, mask = some(size.batch, keys, seed=2), some(size.batch, attn.num_heads, queries, keys, seed=4)
        masks: list[dict[str, Any]] = [{}, {"key_mask": key_mask}, {"mask": mask}]
        masks.append({"key_mask": key_mask, "mask": mask[0, 0]})
        for given in (given for given in masks if all(takes(attn, name) for name in given)):
            what = f"{queries} queries over a context of {keys}, with {' and '.join(given) or 'no masks'}"
            compare(attn, what, x, context, **given)
            if takes(attn, "values"):
                compare(attn, f"{what}, values from elsewhere", x, context, values=values, **given)
        if "documents" in attn.supports and queries <= keys:
            compare(
                attn,
                f"{queries} queries over a context of {keys}, with documents",
                x,
                context,
                documents=documents_of(size.batch, keys),
            )
        inputs = {"x": x, "context": context} | ({"values": values} if takes(attn, "values") else {})
        compare_gradients(attn, f"{queries} queries over a context of {keys}", inputs, key_mask=key_mask)
    if takes(attn, "values"):
        compare(attn, "only values from elsewhere", tokens(attn), values=tokens(attn, seed=7))


def check_documents_are_alone(make: Maker) -> None:
    """Packed documents give what each gives alone, positions included."""
    for positions in make.positions:
        attn = make(positions=positions)
        need(attn, "documents")
        lengths = (4, 1, size.length - 5)
        x = tokens(attn)
        ids = torch.tensor([7, 3, 5]).repeat_interleave(torch.tensor(lengths)).expand(size.batch, -1)
        alone = torch.cat([attn(part) for part in x.split(lengths, dim=1)], dim=1)
        agree(
            attn(x, documents=ids),
            alone,
            f"positions={positions!r}: documents of {lengths} tokens packed, against each alone",
        )


def check_marked_tokens_may_be_none_all_or_hidden(make: Maker) -> None:
    """Sequences may have no marked token, marked ones only, or marked ones that are hidden, in one batch."""
    attn = make()
    need(attn, "marked")
    x, key_mask = tokens(attn), some(size.batch, size.length, seed=2)
    marked = torch.zeros(size.batch, size.length, dtype=torch.bool)
    marked[1::3], marked[2::3] = True, ~key_mask[2::3]
    choices: tuple[Masks, ...] = ({}, {"key_mask": key_mask})
    for given in choices:
        what = f"sequences with no, all and hidden tokens marked, {named(given)}"
        compare(attn, what, x, marked=marked, **given)
        compare(attn, f"no token marked, {named(given)}", x, marked=torch.zeros_like(marked), **given)
        compare_gradients(attn, what, {"x": x}, marked=marked, **given)


def check_weights_are_those_of_the_pattern(make: Maker) -> None:
    """`weights` gives the weight of each key for each query, of all heads and queries or of chosen ones."""
    for positions in make.positions:
        attn = make(positions=positions, dropout=0.2)
        need(attn, "weights")
        if not is_plain(attn):
            raise NotApplicable("it has a definition of its own")
        x, mask = tokens(attn), some(size.batch, 1, size.length, size.length, seed=3)
        given: dict[str, Any] = {"key_mask": some(size.batch, size.length, seed=2), "mask": mask}
        weights = attn.weights(x, **given)
        agree(weights, plain_weights(attn, x, **given)[0], f"positions={positions!r}: weights")
        heads, queries = [4, 0, 3], [-2, 2]
        chosen = attn.weights(x, heads=heads, queries=queries, **given)
        agree(
            chosen,
            weights[:, heads][:, :, queries],
            f"positions={positions!r}: weights of heads {heads}, queries {queries}",
        )
    attn = make()
    for length in (size.length // 2, size.context) if "cross" in attn.supports else ():
        if length <= size.length or "causal" not in attn.supports:
            got, right = attn.weights(tokens(attn, length), x), plain_weights(attn, tokens(attn, length), x)[0]
            agree(got, right, f"weights of {length} queries over a context of {size.length}")


def check_later_tokens_change_nothing(make: Maker) -> None:
    """Under causal, later tokens can hold any finite value and no earlier output changes by a bit."""
    for attn, how, given in _looking_back(make):
        dtype = dtype_of(attn)
        x, later = tokens(attn), size.length // 2
        other = noise(size.batch, size.length - later, attn.d_model, seed=8)
        y = seeded(attn, attn, x, **given)
        for scale in (1, 1e4 if dtype == torch.float16 else 1e30):
            x = x.clone()
            x[:, later:] = other * scale
            changed = seeded(attn, attn, x, **given)
            same(
                changed[:, :later], y[:, :later], f"{dtype}, {how}, tokens from {later} on changed to about {scale:.0e}"
            )


def check_later_tokens_get_no_gradient(make: Maker) -> None:
    """Under causal, the gradient of later tokens from earlier outputs is exactly zero."""
    for attn, how, given in _looking_back(make):
        x, later = tokens(attn).requires_grad_(), size.length // 2
        for call in (attn, lambda x, **masks: checkpoint(attn, x, use_reentrant=False, **masks)):  # noqa: B023 (used at once)
            gradient = gradients(attn, seeded(attn, call, x, **given)[:, :later], x=x)["x"]
            assert gradient is not None
            felt = gradient[:, later:]
            same(felt, torch.zeros_like(felt), f"{how}: gradient of tokens from {later} on")


def _looking_back(make: Maker) -> Iterator[tuple[Attention, str, dict[str, Any]]]:
    """A causal module in each dtype, with masks, with dropout, with positions."""
    need(make(), "causal")
    masks = {"key_mask": some(size.batch, size.length, seed=2), "mask": some(size.length, size.length, seed=3)}
    masks = askable(make(), **masks)
    for dtype in DTYPES:
        yield make(dtype=dtype), "in eval", {}
    yield make(), "with masks", masks
    yield make(dropout=0.3, training=True), "in training with dropout", {}
    yield make(dropout=0.3, training=True), "in training with dropout and masks", masks
    all_true = torch.ones(size.batch, size.length, dtype=torch.bool)
    yield make(dropout=0.3, training=True), "in training with dropout and all tokens real", {"key_mask": all_true}
    for positions in make.positions[1:]:
        yield make(positions=positions), f"with positions={positions!r}", {}
