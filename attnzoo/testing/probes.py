"""What the checks are made of: inputs of distinct sizes, masks in every combination, and comparisons that explain."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo import registry
from attnzoo.attention import Attention
from attnzoo.errors import NotSupportedError
from attnzoo.testing.foreign import Foreign, NotTaken, Refused
from attnzoo.testing.maker import Maker, dtype_of
from attnzoo.testing.reference import oracles
from attnzoo.testing.size import size, sized

Masks = dict[str, Any]  # of a call, by argument

DTYPES = tuple(getattr(torch, name) for name in registry.DTYPES)

Check = Callable[[Maker], None]


def asked(check: Check) -> str:
    """What a check asks for, in one line."""
    return " ".join((check.__doc__ or "").split())


def run(check: Check, make: Maker) -> None:
    """Runs a check with random states of its own, so that it is the same every time and changes nothing outside."""
    others = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), sized(close=make.close):
            torch.manual_seed(0)
            check(make)
    except NotTaken as reason:
        raise NotApplicable(str(reason)) from reason
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])


class NotApplicable(Exception):
    """Raised by a check that has nothing to say about a variant, with the reason."""


def need(attn: Attention, feature: str) -> None:
    """Ends a check of what the variant declares to do without."""
    if feature not in attn.supports:
        raise NotApplicable(f"{feature} is not among what it supports here")


def takes(attn: Attention, argument: str) -> bool:
    """Whether calls may have this argument; all of ours may."""
    return not isinstance(attn, Foreign) or argument in attn.takes


def askable(attn: Attention, **given: Any) -> Masks:
    """Of these arguments, the ones that calls may have."""
    return {name: value for name, value in given.items() if takes(attn, name)}


def need_dropout(make: Maker) -> None:
    """Ends a check of what can't be asked of a module without that option."""
    if "dropout" not in make.accepts:
        raise NotApplicable("it has no option dropout")


def tokens(attn: Attention, length: int | None = None, batch: int | None = None, seed: int = 1) -> Tensor:
    """Tokens [b, t, e] in the dtype of the module."""
    length, batch = size.length if length is None else length, size.batch if batch is None else batch
    return noise(batch, length, attn.d_model, seed=seed).to(dtype_of(attn))


def noise(*shape: int, seed: int) -> Tensor:
    """Normal noise in float64, without touching the global generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(*shape: int, seed: int, share: float = 0.6) -> Tensor:
    """A bool mask that is True at about a share of its places, and at the last of each row."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    chosen[..., -1] = True
    return chosen


def documents_of(batch: int, keys: int) -> Tensor:
    """Document ids [b, k]: a few tokens each, other lengths in each sequence, and one document in two pieces."""
    ids = (torch.arange(keys) + torch.arange(batch)[:, None]) // 3 + 5
    ids[:, -1] = ids[:, 0]
    return ids


def mask_combinations(attn: Attention) -> Iterator[Masks]:
    """Every combination of key_mask, mask in both its forms, and documents and marked where supported."""
    batch, length = size.batch, size.length
    choices: dict[str, list[Tensor]] = {
        "key_mask": [some(batch, length, seed=2)],
        "mask": [some(length, length, seed=3), some(batch, attn.num_heads, length, length, seed=4)],
    }
    choices |= {name: [given] for name, given in told(attn).items()}
    choices = {name: masks for name, masks in choices.items() if takes(attn, name)}
    for chosen in itertools.product(*([None, *masks] for masks in choices.values())):
        yield {name: mask for name, mask in zip(choices, chosen, strict=True) if mask is not None}


def marked_of(batch: int, keys: int) -> Tensor:
    """Marked tokens [b, k]: other ones in each sequence, and the first of each, as a prefix has."""
    marked = some(batch, keys, seed=10, share=0.2)
    marked[:, -1], marked[:, 0] = False, True
    return marked


def told(attn: Attention) -> Masks:
    """What a call may say of its tokens beside masks: documents and marks, where supported."""
    ways = {"documents": documents_of, "marked": marked_of}
    return {name: way(size.batch, size.length) for name, way in ways.items() if name in attn.supports}


def named(given: Masks) -> str:
    """The masks of a call in words."""
    return (
        "with " + " and ".join(f"{name} {list(mask.shape)}" for name, mask in given.items())
        if given
        else "without masks"
    )


def compare(
    attn: Attention,
    what: str,
    *inputs: Tensor,
    call: Callable[..., Tensor] | None = None,
    tolerance: float | None = None,
    every: bool = False,
    **masks: Any,
) -> None:
    """Compares a call with the oracle that shares the least with it, or with every one; `call` is another way to call
    `attn`."""
    got = seeded(attn, call or attn, *inputs, **masks)
    for name, oracle in oracles(attn)[0 if every else -1 :]:
        agree(got, seeded(attn, oracle, *inputs, **masks), f"{what}, against {name}", tolerance)


def compare_with_fresh(used: Attention, make: Callable[[], Attention], what: str) -> None:
    """Compares a module that has been used somehow with a fresh one, in eval and in a training step."""
    fresh, x = make(), tokens(used).requires_grad_()
    agree(used.eval()(x), fresh(x), f"{what}, against a module without a past")
    right = gradients(fresh.train(), seeded(fresh, fresh, x), x=x)
    for name, gradient in gradients(used.train(), seeded(used, used, x), x=x).items():
        agree(gradient, right[name], f"{what}, against a module without a past: gradient of {name}")


def sources(attn: Attention) -> dict[str, Tensor]:
    """A context and, where they may come from a third place, values."""
    found = {"context": tokens(attn, size.context, seed=6), "values": tokens(attn, size.context, seed=7)}
    return {name: source for name, source in found.items() if takes(attn, name)}


def compare_gradients(attn: Attention, what: str, inputs: dict[str, Tensor], **masks: Any) -> None:
    """Compares the gradients of inputs, named x, context and values, and of parameters with those of every oracle."""
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    sources, given = [inputs[name] for name in ("x", "context") if name in inputs], dict(masks)
    if "values" in inputs:
        given["values"] = inputs["values"]
    got = gradients(attn, seeded(attn, attn, *sources, **given), **inputs)
    for name, oracle in oracles(attn):
        right = gradients(attn, seeded(attn, oracle, *sources, **given), **inputs)
        for key, gradient in right.items():
            agree(got[key], gradient, f"{what}, against {name}: gradient of {key}")


def checkpointed(attn: Attention) -> Callable[..., Tensor]:
    """The same attention under non-reentrant gradient checkpointing."""

    def call(*inputs: Tensor, **given: Any) -> Tensor:
        return checkpoint(attn, *inputs, use_reentrant=False, **given)

    return call


def seeded(attn: Attention, call: Callable[..., Tensor], *inputs: Any, **given: Any) -> Tensor:
    """The result of a call that in training draws what others draw."""
    if attn.training:
        torch.manual_seed(0)
    return call(*inputs, **given)


def agree(got: Tensor | None, right: Tensor | None, what: str, tolerance: float | None = None) -> None:
    """Fails unless two tensors are equal up to a tolerance, NaN to NaN, and says where they differ most."""
    tolerance = size.close if tolerance is None else tolerance
    if got is None or right is None:
        assert got is right, f"{what}: there is {_kind(got)}, and {_kind(right)} is right"
        return
    assert got.shape == right.shape, f"{what}: the shape is {list(got.shape)}, and {list(right.shape)} is right"
    if not got.numel():
        return
    wide = torch.promote_types(torch.promote_types(got.dtype, right.dtype), torch.float32)
    got, right = got.detach().to(wide), right.detach().to(wide)
    equal = (got == right) | (got.isnan() & right.isnan())
    off = (got - right).abs().masked_fill(equal, 0).nan_to_num(math.inf)
    worst = int(off.argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst), off.shape)]
    assert off.flatten()[worst] <= tolerance, (
        f"{what}: at {place} there is {got.flatten()[worst]:.6g}, and {right.flatten()[worst]:.6g} is right "
        f"(off by {off.flatten()[worst]:.2g}, {tolerance:.2g} allowed)"
    )


def same(got: Tensor | None, right: Tensor | None, what: str) -> None:
    """Fails unless two tensors are equal to the last bit."""
    agree(got, right, what, tolerance=0)


def differ(one: Tensor, other: Tensor, what: str) -> None:
    """Fails where two tensors are equal and should not be."""
    assert not torch.equal(one, other), f"{what}: the results are equal, and should differ"


def finite(tensor: Tensor | None, what: str) -> None:
    """Fails unless every number of a tensor is finite."""
    assert tensor is not None, f"{what}: there is none"
    assert bool(tensor.isfinite().all()), (
        f"{what}: {int((~tensor.isfinite()).sum())} of {tensor.numel()} numbers are not finite"
    )


def refuses(
    error: type[Exception],
    what: str,
    call: Callable[..., Any],
    *inputs: Any,
    naming: Sequence[object] = (),
    **given: Any,
) -> None:
    """Fails unless a call raises this error, with these words in its message."""
    try:
        call(*inputs, **given)
    except NotTaken:
        if error is not NotSupportedError:  # then it could not be asked
            raise
        return
    except error as raised:
        message, foreign = str(raised), isinstance(raised, Refused)
    except Exception as raised:
        raise AssertionError(f"{what}: {type(raised).__name__} ({raised}), and a {error.__name__} is right") from raised
    else:
        raise AssertionError(f"{what}: it was accepted, and a {error.__name__} is right")
    missing = [str(word) for word in naming if str(word) not in message]
    missing = [] if foreign else missing  # a module of somebody else's has words of its own
    assert not missing, f"{what}: the {error.__name__} should name {' and '.join(missing)}; it says: {message}"


def gradients(attn: Attention, output: Tensor, **inputs: Tensor) -> dict[str, Tensor | None]:
    """The gradients of inputs and parameters, by name, of a loss in which every output number has its own weight; an
    output may be asked more than once."""
    if isinstance(attn, Foreign) and not attn.backward:
        raise NotApplicable("it declares to have no backward here")
    wanted = {**inputs, **dict(attn.named_parameters())}
    if not wanted:
        return {}
    loss = (output.double() * noise(*output.shape, seed=9)).sum()
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, retain_graph=True)
    return dict(zip(wanted, found, strict=True))


def _kind(value: Tensor | None) -> str:
    return "none" if value is None else f"a tensor {list(value.shape)}"
