"""What hidden tokens may do, and where queries stand: promises 5 and 6."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    agree,
    finite,
    gradients,
    need,
    same,
    seeded,
    some,
    sources,
    tokens,
)
from attnzoo.testing.size import size

GARBAGE = (1e3, 1e30, torch.inf, torch.nan)


def check_padding_cannot_be_felt(make: Maker) -> None:
    """What hidden tokens hold, be it garbage, inf or NaN, changes no output and no gradient of a parameter."""
    for attn, key_mask in _padded(make):
        x = tokens(attn)
        y = seeded(attn, attn, x, key_mask=key_mask)
        right = gradients(attn, y)
        for garbage in GARBAGE:
            filled = x.masked_fill(~key_mask[:, :, None], garbage)
            what = f"positions={attn.positions!r}, hidden tokens filled with {garbage}"
            again = seeded(attn, attn, filled, key_mask=key_mask)
            same(again, y, what)
            for name, gradient in gradients(attn, again).items():
                same(gradient, right[name], f"{what}: gradient of {name}")


def check_padding_gets_no_gradient(make: Maker) -> None:
    """The gradient of a hidden token is exactly zero, whatever it holds."""
    for attn, key_mask in _padded(make):
        for garbage in (0.0, *GARBAGE):
            x = tokens(attn).masked_fill(~key_mask[:, :, None], garbage).requires_grad_()
            gradient = gradients(attn, attn(x, key_mask=key_mask), x=x)["x"]
            what = f"positions={attn.positions!r}, hidden tokens filled with {garbage}: gradient of x"
            finite(gradient, what)
            assert gradient is not None
            same(gradient[~key_mask], torch.zeros_like(gradient[~key_mask]), f"{what}, at hidden tokens")


def check_padding_in_half_precision_cannot_be_felt(make: Maker) -> None:
    """The same holds in half precision and under autocast."""
    key_mask = some(size.batch, size.length, seed=2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        attn = make(dtype=dtype)
        x = tokens(attn)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            for garbage in (1e4, torch.inf, torch.nan):
                filled = x.masked_fill(~key_mask[:, :, None], garbage)
                same(
                    attn(filled, key_mask=key_mask),
                    attn(x, key_mask=key_mask),
                    f"{dtype}, hidden tokens filled with {garbage}",
                )


def check_padding_of_context_cannot_be_felt(make: Maker) -> None:
    """What hidden tokens of a context hold changes no output and no gradient, their own being exactly zero."""
    attn = make()
    need(attn, "cross")
    key_mask = some(size.batch, size.context, seed=2)
    x, clean = tokens(attn), sources(attn)
    right = attn(x, **clean, key_mask=key_mask)
    wanted = gradients(attn, right)
    for garbage in GARBAGE:
        filled = {
            name: source.masked_fill(~key_mask[:, :, None], garbage).requires_grad_() for name, source in clean.items()
        }
        y = attn(x, **filled, key_mask=key_mask)
        same(y, right, f"hidden tokens of the context filled with {garbage}")
        for name, gradient in gradients(attn, y, **filled).items():
            if name in wanted:
                same(gradient, wanted[name], f"hidden tokens of the context filled with {garbage}: gradient of {name}")
            elif gradient is not None:
                hidden = gradient[~key_mask]
                same(
                    hidden,
                    torch.zeros_like(hidden),
                    f"context filled with {garbage}: gradient of hidden tokens of {name}",
                )


def check_padding_on_the_right_changes_nothing(make: Maker) -> None:
    """A sequence gives the same alone and padded longer on the right."""
    for attn in _with_positions(make, "right_padding"):
        for length in (1, min(4, size.length), size.length):
            x, longer = tokens(attn, length), tokens(attn, size.length + 8)
            longer[:, :length] = x
            key_mask = (torch.arange(size.length + 8) < length).expand(size.batch, -1)
            y = attn(longer, key_mask=key_mask)[:, :length]
            agree(y, attn(x), f"positions={attn.positions!r}, {length} tokens padded on the right to {size.length + 8}")


def check_padding_on_the_left_changes_nothing(make: Maker) -> None:
    """A sequence gives the same alone and padded longer on the left, where the pattern knows distances only."""
    for attn in _with_positions(make, "left_padding"):
        for length in (1, min(4, size.length), size.length):
            x, longer = tokens(attn, length), tokens(attn, size.length + 8)
            longer[:, -length:] = x
            key_mask = (torch.arange(size.length + 8) >= size.length + 8 - length).expand(size.batch, -1)
            y = attn(longer, key_mask=key_mask)[:, -length:]
            agree(y, attn(x), f"positions={attn.positions!r}, {length} tokens padded on the left to {size.length + 8}")


def check_padding_of_context_changes_nothing(make: Maker) -> None:
    """A context gives the same alone and padded longer on the right, where everything sees everything."""
    attn = make()
    need(attn, "cross")
    need(attn, "bidirectional")
    x, context, longer = tokens(attn), tokens(attn, size.context, seed=6), tokens(attn, size.context + 8, seed=7)
    longer[:, : size.context] = context
    key_mask = (torch.arange(size.context + 8) < size.context).expand(size.batch, -1)
    agree(
        attn(x, longer, key_mask=key_mask),
        attn(x, context),
        f"a context of {size.context} padded on the right to {size.context + 8}",
    )


def check_queries_stand_at_the_end(make: Maker) -> None:
    """Query i of q stands at position i + (k - q)."""
    attn = make()
    whole = attn.visible(size.context)
    for queries in (1, min(4, size.context), size.length, size.context):
        shown = attn.visible(queries, size.context)
        wanted = [whole.shape[0], queries, size.context]
        assert list(shown.shape) == wanted, (
            f"visible({queries}, {size.context}) is {list(shown.shape)}, and {wanted} is right"
        )
        assert torch.equal(shown, whole[:, -queries:]), (
            f"visible({queries}, {size.context}) is not the end of visible({size.context})"
        )
    if "cross" in attn.supports:
        x = tokens(attn, size.context)
        for queries in (1, min(4, size.length), size.length):
            agree(
                attn(x[:, -queries:], x), attn(x)[:, -queries:], f"{queries} queries over a context that ends with them"
            )


def _padded(make: Maker) -> Iterator[tuple[Attention, Tensor]]:
    """In eval and in training, with each kind of positions; one sequence is hidden whole."""
    key_mask = some(size.batch, size.length, seed=2)
    key_mask[1:2] = False
    for positions in make.positions:
        yield make(positions=positions), key_mask
    yield make(dropout=0.3, training=True), key_mask


def _with_positions(make: Maker, feature: str) -> Iterator[Attention]:
    for positions in make.positions:
        attn = make(positions=positions)
        need(attn, feature)
        yield attn
