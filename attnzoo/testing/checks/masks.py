"""What a query may look at: promises 1 to 4."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.errors import MaskError
from attnzoo.testing.foreign import Foreign
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    DTYPES,
    Masks,
    NotApplicable,
    agree,
    askable,
    checkpointed,
    compare,
    finite,
    gradients,
    mask_combinations,
    named,
    refuses,
    same,
    seeded,
    some,
    takes,
    tokens,
    told,
)
from attnzoo.testing.reference import is_plain, may_look, output_of_nothing, plain, rounded_definition
from attnzoo.testing.size import size

LOOSE = 0.05  # for bfloat16; a mask that is not heeded is further off


def check_true_means_may_look(make: Maker) -> None:
    """True in a mask means that a query may look, or that a token is real; False hides."""
    attn = make()
    x = tokens(attn)
    key_mask, mask = (
        torch.ones(size.batch, size.length, dtype=torch.bool),
        torch.ones(size.length, size.length, dtype=torch.bool),
    )
    full = _askable(attn, {"key_mask": key_mask, "mask": mask})
    agree(attn(x, **full), attn(x), "masks that are all True, against no mask")
    masks: dict[str, Any] = {
        "key_mask": some(size.batch, size.length, seed=2),
        "mask": some(size.length, size.length, seed=3),
    }
    masks = _askable(attn, masks)
    for name, mask in masks.items():
        y, hidden = attn(x, **{name: mask}), int((~mask).sum())
        compare(attn, f"with a {name}", x, **{name: mask})
        assert not torch.allclose(y, attn(x)), f"a {name} that is False in {hidden} places changed nothing"


def check_whole_numbers_are_masks(make: Maker) -> None:
    """Masks of whole numbers, as tokenizers give them, mean the same as bool ones; non-zero is True."""
    attn = make()
    masks = {"key_mask": some(size.batch, size.length, seed=2), "mask": some(size.length, size.length, seed=3)}
    x, masks = tokens(attn), _askable(attn, masks)
    right = attn(x, **masks)
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        for one in (1, 2, 127):
            y = attn(x, **{name: mask.to(dtype) * one for name, mask in masks.items()})
            same(y, right, f"{dtype} masks of 0 and {one}, against bool ones")


def check_float_masks_are_refused(make: Maker) -> None:
    """A float mask is a MaskError, whichever float type and numbers it has; so are float documents and marks."""
    attn = make()
    x, key_mask, mask = tokens(attn), some(size.batch, size.length, seed=2), some(size.length, size.length, seed=3)
    ways = [(name, given) for name, given in (("key_mask", key_mask), ("mask", mask), ("mask", mask[None, None]))]
    ways = [way for way in ways if takes(attn, way[0])]
    if not ways:
        raise NotApplicable("its forward takes no mask")
    for dtype in DTYPES:
        for name, given in ways:
            added = torch.zeros(given.shape, dtype=dtype).masked_fill(~given, -torch.inf)
            for kind, floats in (("0 and 1", given.to(dtype)), ("0 and -inf", added)):
                refuses(MaskError, f"a {name} of {kind} in {dtype}", attn, x, **{name: floats}, naming=(name,))
        for name, ids in told(attn).items():
            refuses(MaskError, f"{name} in {dtype}", attn, x, **{name: ids.to(dtype)}, naming=(name,))


def check_other_mask_shapes_are_refused(make: Maker) -> None:
    """Masks of any other shape are a MaskError that names the right one."""
    attn = make()
    x = tokens(attn)
    if takes(attn, "mask"):
        _refuse_other_masks(attn, size.batch, size.length)
    shapes = (
        (size.length,),
        (size.batch, 1),
        (1, size.length),
        (size.batch, size.length + 1),
        (size.batch, 1, 1, size.length),
        (size.length, size.batch),
        (),
    )
    for shape in shapes:
        for name in ("key_mask", *told(attn)):
            given = {name: torch.ones(shape, dtype=torch.int64)}
            refuses(MaskError, f"{name} {list(shape)}", attn, x, **given, naming=(size.batch, size.length))


def check_equal_sizes_change_no_meaning(make: Maker) -> None:
    """A mask means what its argument says, also where batch, length and heads happen to be equal."""
    attn = make()
    n = attn.num_heads
    x, mask, key_mask, what = tokens(attn, n, n), some(n, n, seed=3), some(n, n, seed=2), f"b = h = q = {n}"
    compare(attn, f"{what}, with a mask", x, mask=mask)
    compare(attn, f"{what}, with a key_mask", x, key_mask=key_mask)
    masked, padded = attn(x, mask=mask), attn(x, key_mask=key_mask)
    for row in range(n):
        one = slice(row, row + 1)
        agree(masked[one], attn(x[one], mask=mask), f"{what}, with a mask, sequence {row} against itself alone")
        alone = attn(x[one], key_mask=key_mask[one])
        agree(padded[one], alone, f"{what}, with a key_mask, sequence {row} against itself alone")
    _refuse_other_masks(attn, n, n)
    _refuse_other_masks(attn, size.length, size.length)
    _refuse_other_masks(attn, n, size.length)


def _refuse_other_masks(attn: Attention, batch: int, length: int) -> None:
    x, heads = tokens(attn, length, batch), attn.num_heads
    shapes = [(length,), (1, length), (length, 1), (length, length + 1), (1, length, length), (batch, length, length)]
    shapes += [
        (heads, length, length),
        (batch + 1, 1, length, length),
        (1, heads + 1, 1, 1),
        (1, 1, 1, length, length),
        (),
    ]
    shapes += [(batch, length)] if batch != length else []
    for shape in shapes:
        what = f"b = {batch}, q = {length}: a mask {list(shape)}"
        refuses(MaskError, what, attn, x, mask=torch.ones(shape, dtype=torch.bool), naming=(length, batch, heads))


def check_masks_combine(make: Maker) -> None:
    """A query may look at what pattern, masks, documents and marks all allow: in eval, in training with dropout,
    checkpointed, and under autocast."""
    attn = make()
    ways: list[tuple[str, Attention, Callable[..., Tensor]]] = [("in eval", attn, attn)]
    training = make(dropout=1e-12, training=True)  # so little that no weight is dropped
    ways += [("in training with dropout", training, training), ("checkpointed", training, checkpointed(training))]
    for way, module, call in ways:
        x = tokens(module).requires_grad_(way == "checkpointed")
        for given in mask_combinations(module):
            compare(module, f"{way}, {named(given)}", x, call=call, **given)
    attn, exact = make(dtype=torch.float32), make()
    exact.load_state_dict(attn.state_dict())
    x = tokens(attn) * 2
    for given in mask_combinations(attn):
        with torch.autocast("cpu", torch.bfloat16):
            y, rounded = attn(x, **given), rounded_definition(attn)(x, **given)
        right = plain(exact, x.double(), **given) if is_plain(attn) else rounded
        agree(y, right, f"under bfloat16 autocast, {named(given)}", LOOSE)


def check_masks_broadcast(make: Maker) -> None:
    """A 4-D mask may have 1 in place of batch, heads, queries or keys."""
    attn = make()
    x, full = tokens(attn), (size.batch, attn.num_heads, size.length, size.length)
    for axes in range(16):
        shape = [size if axes >> axis & 1 else 1 for axis, size in enumerate(full)]
        mask = some(*shape, seed=5)
        compare(attn, f"with a mask {shape}", x, mask=mask)
        agree(attn(x, mask=mask), attn(x, mask=mask.expand(full)), f"a mask {shape}, against the same expanded")


def check_sequences_are_alone(make: Maker) -> None:
    """A sequence of a batch gives what it gives alone, whatever its masks."""
    attn = make()
    x = tokens(attn)
    for given in mask_combinations(attn):
        y = attn(x, **given)
        for row in range(size.batch):
            one = slice(row, row + 1)
            alone = {name: mask[one] if mask.shape[0] == size.batch else mask for name, mask in given.items()}
            agree(attn(x[one], **alone), y[one], f"sequence {row} alone, {named(given)}")


def check_gradient_mode_changes_nothing(make: Maker) -> None:
    """Whether gradients are recorded, or may ever be, changes no output, that of hidden queries included, in a batch
    and in one sequence."""
    attn = make()
    x, ends = tokens(attn), some(size.batch, size.length, seed=2)
    ends[:, -2:] = False  # the last tokens are hidden in every sequence
    for given in (*mask_combinations(attn), askable(attn, key_mask=ends)):
        for rows in (slice(None), slice(0, 1)):
            some_of = {name: mask[rows] if len(mask) == size.batch else mask for name, mask in given.items()}
            y = attn(x[rows].clone().requires_grad_(), **some_of)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    what = f"under {mode.__name__}, {named(some_of)}, against a call with gradients"
                    agree(attn(x[rows], **some_of), y, what)


def check_hidden_keys_have_no_weight(make: Maker) -> None:
    """A key that a mask hides has no part in the weights, however low the scores of the visible keys are."""
    hidden = size.length // 2
    only_itself = torch.eye(size.length, dtype=torch.bool)
    for dtype in DTYPES:
        attn = make(dtype=dtype)
        x = tokens(attn) * (600 if dtype == torch.float16 else 1e8)
        other = x.clone()
        other[:, hidden] = x[:, hidden].flip(-1)
        rest = torch.arange(size.length) != hidden
        for shown, mask in (("all others", torch.ones_like(only_itself)), ("itself", only_itself)):
            mask = mask & rest
            y, changed = attn(x, mask=mask), attn(other, mask=mask)
            finite(y, f"{dtype}, scores far from 0")
            what = f"{dtype}, scores far from 0, each query sees {shown}"
            same(changed[:, rest], y[:, rest], f"{what}: token {hidden}, which none sees, changed")
            if shown == "itself" and is_plain(attn):  # else rounding decides which score is the highest
                right = plain(attn, x, mask=mask).detach()
                agree(y, right, what, 32 * torch.finfo(dtype).eps * float(right.abs().max()))


def check_gradients_go_where_queries_look(make: Maker) -> None:
    """An output depends on the tokens that its query may look at, and on no other."""
    for training in (False, True):
        attn = make(dropout=0.3 if training else 0.0, training=training)
        if attn.redraws:
            continue  # nobody can know what it shows
        mask = some(size.batch, attn.num_heads, size.length, size.length, seed=4)
        given = {"key_mask": some(size.batch, size.length, seed=2), "mask": mask, **told(attn)}
        given = {name: one for name, one in given.items() if takes(attn, name)}
        x = tokens(attn).requires_grad_()
        y = attn(x, **given)
        seen = may_look(attn, size.batch, size.length, size.length, **given).any(1)  # [b q k]
        itself = torch.eye(size.length, dtype=torch.bool) & seen.any(-1, keepdim=True)
        real = given.get("key_mask", torch.ones(size.batch, size.length, dtype=torch.bool))
        itself = itself & real[:, None]
        felt = torch.empty_like(seen)
        for query in range(size.length):
            (gradient,) = torch.autograd.grad(y[:, query].square().sum(), x, retain_graph=True)
            finite(gradient, f"gradient of query {query}")
            felt[:, query] = (gradient != 0).any(-1)
        mode = "in training" if training else "in eval"
        _none(
            felt & ~(seen | itself),
            f"{mode}, sequence {{}}: query {{}} depends on token {{}}, which it may not look at",
        )
        if isinstance(attn, Foreign):
            seen &= real[:, :, None]  # what it gives for hidden queries is not looked at
        if is_plain(attn) and not training:
            _none(seen & ~felt, f"{mode}, sequence {{}}: query {{}} ignores token {{}}, which it may look at")


def _none(wrong: Tensor, what: str) -> None:
    if wrong.any():
        raise AssertionError(what.format(*wrong.nonzero()[0].tolist()) + f" ({int(wrong.sum())} such pairs)")


def check_queries_that_see_nothing_get_zero(make: Maker) -> None:
    """A query that may look at nothing gets zero, before the output projection, in every dtype and mode."""
    for dtype in DTYPES:
        for training in (False, True):
            attn = make(dtype=dtype, training=training, dropout=0.2)
            x = tokens(attn)
            for name, given, empty in _leaving_nothing(attn):
                what = f"{dtype}, {'training' if training else 'eval'}, {name}"
                y = attn(x, **given)
                same(y[empty], output_of_nothing(attn, x, **given)[empty], f"{what}: queries that see nothing")
                finite(y, what)


def check_queries_that_see_nothing_give_no_gradient(make: Maker) -> None:
    """A query that may look at nothing gives zero gradients, never NaN, in every dtype and mode."""
    for dtype in DTYPES:
        for training in (False, True):
            attn = make(dtype=dtype, training=training, dropout=0.2)
            x = tokens(attn).requires_grad_()
            for name, given, empty in _leaving_nothing(attn):
                what = f"{dtype}, {'training' if training else 'eval'}, {name}"
                y = attn(x, **given)
                right = gradients(attn, output_of_nothing(attn, x, **given).masked_fill(~empty[:, :, None], 0), x=x)
                found = gradients(attn, y.masked_fill(~empty[:, :, None], 0), x=x)
                for key, gradient in found.items():
                    wanted = right[key]
                    if gradient is not None:
                        wanted = torch.zeros_like(gradient) if wanted is None else wanted
                        told_of = f"{what}: gradient of {key} from queries that see nothing"
                        if wanted.any():  # a sum, which may be taken in another order
                            scale = float(wanted.abs().max())
                            agree(gradient, wanted, told_of, 64 * torch.finfo(gradient.dtype).eps * max(1.0, scale))
                        else:
                            same(gradient, wanted, told_of)
                for key, gradient in gradients(attn, y, x=x).items():
                    finite(gradient, f"{what}: gradient of {key}")


def check_queries_that_see_nothing_harm_no_other(make: Maker) -> None:
    """A sequence that is hidden whole changes no output and no gradient of the others."""
    attn = make(training=True)
    x, key_mask = tokens(attn).requires_grad_(), some(size.batch, size.length, seed=2)
    others = torch.arange(size.batch) != 1
    key_mask[~others] = False
    y = seeded(attn, attn, x, key_mask=key_mask)
    alone = seeded(attn, attn, x[others], key_mask=key_mask[others])
    agree(y[others], alone, "beside a sequence that is hidden whole")
    got, right = gradients(attn, y[others], x=x), gradients(attn, alone, x=x)
    for name, gradient in right.items():
        agree(got[name], gradient, f"beside a sequence that is hidden whole: gradient of {name}")


def _leaving_nothing(attn: Attention) -> list[tuple[str, Masks, Tensor]]:
    """Ways to leave queries with nothing to look at: what it is, the masks, and which queries [b, q] that are."""
    mask, key_mask = some(size.length, size.length, seed=3), some(size.batch, size.length, seed=2)
    rows = torch.zeros(size.batch, size.length, dtype=torch.bool)
    sequence, hole = torch.zeros_like(rows), torch.zeros_like(rows)
    rows[:, 2::4], sequence[1:2], hole[:, [0, 1, -1]] = True, True, True
    mask, key_mask = mask & ~rows[0, :, None], key_mask & ~sequence
    ways: list[tuple[str, Masks, Tensor]] = [
        ("some rows of the mask False", {"mask": mask}, rows),
        ("a sequence hidden whole", {"key_mask": key_mask}, sequence),
        ("a sequence hidden twice", {"key_mask": key_mask, "mask": ~sequence[:, None, None]}, sequence),
    ]
    if not attn.redraws:
        unseen = ~may_look(attn, size.batch, size.length, size.length, hole).any((1, 3))
        hides = ~attn.visible(size.length)[None]
        ways.append(("a mask of all that the pattern hides", {"mask": hides}, torch.ones_like(rows)))
        ways.append(("all but three tokens hidden", {"key_mask": hole}, unseen))
    ways = [way for way in ways if all(takes(attn, name) for name in way[1])]
    if not ways:
        raise NotApplicable("its forward takes no mask")
    return ways


def _askable(attn: Attention, masks: Masks) -> Masks:
    """The masks that it takes, one at least."""
    found = askable(attn, **masks)
    if not found:
        raise NotApplicable(f"its forward takes no {' nor '.join(masks)}")
    return found
