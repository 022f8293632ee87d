"""Any size and any dtype: promises 12 and 13."""

import copy

import torch
from torch import Tensor, nn

from attnzoo.attention import Attention
from attnzoo.testing.checks.decoding import decode
from attnzoo.testing.foreign import Foreign, bare
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    DTYPES,
    Masks,
    NotApplicable,
    agree,
    askable,
    compare,
    compare_gradients,
    finite,
    gradients,
    same,
    some,
    tokens,
)
from attnzoo.testing.reference import is_plain, plainly, rounded_definition
from attnzoo.testing.size import size

LONG = 130  # two blocks of 64 and a rest


def check_any_length(make: Maker) -> None:
    """Any length is right: one token, shorter than a block or a window, and none that a block divides."""
    for length in (1, 2, 3, 4, 5, 8, 17, LONG):
        attn = make()
        x, key_mask = tokens(attn, length), some(size.batch, length, seed=2)
        compare(attn, f"{length} tokens", x)
        compare(attn, f"{length} tokens, padded", x, key_mask=key_mask)


def check_gradients_at_any_length(make: Maker) -> None:
    """The gradients are right at any length too."""
    for length in (1, 2, 5, LONG):
        attn = make()
        compare_gradients(
            attn, f"{length} tokens", {"x": tokens(attn, length, batch=2)}, key_mask=some(2, length, seed=2)
        )


def check_empty_batch(make: Maker) -> None:
    """An empty batch gives an empty output, and zero gradients."""
    attn = make(training=True)
    x = tokens(attn, batch=0).requires_grad_()
    masks = askable(attn, key_mask=some(0, size.length, seed=2), mask=some(size.length, size.length, seed=3))
    for given in ({}, masks):
        y = attn(x, **given)
        assert list(y.shape) == list(x.shape), f"an input {list(x.shape)} gives {list(y.shape)}"
        for name, gradient in gradients(attn, y, x=x).items():
            assert gradient is not None and not gradient.any(), f"gradient of {name} of an empty batch is {gradient}"


def check_one_of_everything(make: Maker) -> None:
    """One head, one sequence, one token and heads of one feature lose no dimension."""
    b, t, e = size.batch, size.length, size.d_model
    for heads, batch, length in (
        (1, b, t),
        (1, 1, t),
        (1, 1, 1),
        (2, 1, 1),
        (2, b, 1),
        (2, 2, 2),
        (e, b, t),
        (e, 1, 1),
    ):
        attn = make(num_heads=heads)
        x, what = tokens(attn, length, batch), f"{heads} heads, {batch} sequences of {length} tokens"
        mask, key_mask = some(batch, heads, length, length, seed=4), some(batch, length, seed=2)
        compare(attn, what, x)
        compare(attn, f"{what}, with masks", x, **askable(attn, mask=mask, key_mask=key_mask))
        if "cache" in attn.supports:
            agree(decode(attn, x, (1,) * length), attn(x), f"{what}, token by token, against at once")


def check_inputs_in_any_layout(make: Maker) -> None:
    """Inputs and masks may be views: transposed, sliced or expanded."""
    attn = make()
    for name, view in _views(tokens(attn)).items():
        agree(attn(view), attn(view.contiguous()), f"x is {name}, against a copy")
    views = (
        _views(some(size.batch, attn.num_heads, size.length, size.length, seed=4)),
        _views(some(size.batch, 1, size.length, seed=2)),
    )
    for (name, mask), key_mask in zip(views[0].items(), views[1].values(), strict=True):
        masks = askable(attn, mask=mask, key_mask=key_mask[:, 0])
        y = attn(tokens(attn), **masks)
        right = attn(tokens(attn), **{kind: given.contiguous() for kind, given in masks.items()})
        agree(y, right, f"the masks are {name}, against copies")
    if "cross" in attn.supports:
        for name, view in _views(tokens(attn, size.context)).items():
            agree(
                attn(tokens(attn), view),
                attn(tokens(attn), view.contiguous()),
                f"the context is {name}, against a copy",
            )


def _views(x: Tensor) -> dict[str, Tensor]:
    return {
        "transposed": x.transpose(0, -2).contiguous().transpose(0, -2),
        "sliced": torch.stack([x, x], dim=-1)[..., 0],
        "expanded": x[:1].expand_as(x),
    }


def check_fewer_key_value_heads(make: Maker) -> None:
    """Query head i reads key-value head i // (heads / key-value heads), in decoding too."""
    if "num_kv_heads" not in make.accepts:
        raise NotApplicable("it has no option num_kv_heads")
    for groups in (1, 2, 3, 6):
        if size.heads % groups:
            continue
        attn = make(num_kv_heads=groups)
        assert attn.num_kv_heads == groups, f"num_kv_heads={groups} gives {attn.num_kv_heads}"
        compare(attn, f"num_kv_heads={groups}", tokens(attn))
        if "cache" in attn.supports:
            y = decode(attn, tokens(attn), (1,) * size.length)
            agree(y, attn(tokens(attn)), f"num_kv_heads={groups}, token by token, against at once")
    compare_gradients(make(num_kv_heads=2), "num_kv_heads=2", {"x": tokens(attn)})


def check_lower_precision(make: Maker) -> None:
    """In lower precision the error is at most twice that of a plain implementation in the same dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for positions, length in zip(make.positions, (size.length, 70, 70), strict=False):
            attn = make(dtype=dtype, positions=positions)
            _no_worse_than_plain(attn, tokens(attn, length), f"{dtype}, positions={positions!r}")


def check_gradients_in_lower_precision(make: Maker) -> None:
    """In lower precision the error of the gradients is at most twice that of a plain implementation too."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for positions, length in zip(make.positions, (70, size.length, size.length), strict=False):
            attn = make(dtype=dtype, positions=positions)
            x = tokens(attn, length).requires_grad_()
            got, what = _joined(attn, attn(x), x), f"{dtype}, positions={positions!r}: all gradients in one"
            if not is_plain(attn) and not isinstance(attn, Foreign):
                right = _joined(attn, rounded_definition(attn)(x), x)
                agree(
                    got, right, f"{what}, against the definition", 8 * torch.finfo(dtype).eps * float(right.abs().max())
                )
                continue
            exact, wide = copy.deepcopy(attn).double(), x.detach().double().requires_grad_()
            right = _joined(exact, plainly(exact)(wide), wide)
            others = float((_joined(attn, plainly(attn)(x), x) - right).abs().max())
            agree(got, right, f"{what}, against float64", 2 * others + 1e-5 * float(right.abs().max()))


def _joined(attn: Attention, y: Tensor, x: Tensor) -> Tensor:
    """All gradients as one vector, as some are zero but for rounding and have no scale of their own."""
    found = gradients(attn, y, x=x).values()
    return torch.cat([gradient.double().flatten() for gradient in found if gradient is not None])


def check_softmax_is_wide(make: Maker) -> None:
    """Scores and softmax have float32 at least: large scores that differ by little keep their differences."""
    for dtype in (torch.bfloat16, torch.float16):
        attn = make(dtype=dtype)
        if not is_plain(attn) or not isinstance(bare(attn).out_proj, nn.Linear):
            raise NotApplicable("it has a definition or layers of its own")
        with torch.no_grad():  # all numbers are small multiples of 1/4: only softmax and the output are rounded
            for parameter in attn.parameters():
                parameter.copy_((parameter * 8).round() / 4)
            bare(attn).out_proj.weight.copy_(torch.eye(attn.d_model))
        x = (tokens(attn) * 1.5).round()
        _no_worse_than_plain(attn, x, f"{dtype}, scores up to 50")


def _no_worse_than_plain(attn: Attention, x: Tensor, what: str) -> None:
    y = attn(x).detach()
    if not is_plain(attn) and not isinstance(attn, Foreign):
        right = rounded_definition(attn)(x).detach()
        allowed = 4 * torch.finfo(x.dtype).eps * float(right.abs().max())
        agree(y, right, f"{what}, against its definition", allowed)
        return
    right = plainly(copy.deepcopy(attn).double())(x.double()).detach()
    others = float((plainly(attn)(x).detach() - right).abs().max())
    agree(y, right, f"{what}, against float64", 2 * others + 1e-5 * float(right.abs().max()))


def check_large_scores_stay_finite(make: Maker) -> None:
    """Scores beyond the range of float16 give finite outputs."""
    attn = make(dtype=torch.float16)
    x = tokens(attn) * 600
    finite(attn(x), "float16 scores of about 100000")
    finite(attn(x, key_mask=some(size.batch, size.length, seed=2)), "float16 scores of about 100000, with a key_mask")


def check_default_dtype_plays_no_part(make: Maker) -> None:
    """torch's default dtype changes no output and no dtype, whether it is set before building or after."""
    before = torch.get_default_dtype()
    for positions in make.positions:
        attn = make(dtype=torch.float32, positions=positions)
        x = tokens(attn)
        given: Masks = {"key_mask": some(size.batch, size.length, seed=2)}
        right = attn(x, **given)
        try:
            for default in (torch.float64, torch.bfloat16):
                torch.set_default_dtype(default)
                what = f"positions={positions!r}, with {default} as torch's default dtype"
                y = attn(x, **given)
                assert y.dtype == torch.float32, f"{what}: float32 in gives {y.dtype} out"
                same(y, right, what)
                built = make(positions=positions)
                assert built(tokens(built)).dtype == torch.float64, f"{what}: built so, float64 in is not float64 out"
                compare(built, f"{what}, set before building", tokens(built), **given)
        finally:
            torch.set_default_dtype(before)


def check_dtype_is_kept(make: Maker) -> None:
    """The output has the dtype of the input, and under autocast that of autocast; gradients have their tensor's."""
    for dtype in DTYPES:
        for positions in make.positions:
            attn = make(dtype=dtype, positions=positions)
            x = tokens(attn).requires_grad_()
            y = attn(x, key_mask=some(size.batch, size.length, seed=2))
            assert y.dtype == dtype, f"positions={positions!r}: {dtype} in gives {y.dtype} out"
            for name, gradient in gradients(attn, y, x=x).items():
                kind = None if gradient is None else gradient.dtype
                assert kind == dtype, f"{dtype} in: gradient of {name} is {kind}"
    attn = make(dtype=torch.float32, training=True)
    for dtype in (torch.bfloat16, torch.float16):
        x = tokens(attn).requires_grad_()
        with torch.autocast("cpu", dtype):
            y = attn(x, **askable(attn, mask=some(size.length, size.length, seed=3)))
        assert y.dtype == dtype, f"under {dtype} autocast the output is {y.dtype}"
        for name, gradient in gradients(attn, y, x=x).items():
            finite(gradient, f"under {dtype} autocast: gradient of {name}")
            kind = None if gradient is None else gradient.dtype
            assert kind == torch.float32, f"under {dtype} autocast: gradient of {name} is {kind}"
