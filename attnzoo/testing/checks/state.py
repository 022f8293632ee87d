"""That nothing sticks, and that modules travel well: promises 14 and 15."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.attention import Attention
from attnzoo.testing.maker import Maker, dtype_of
from attnzoo.testing.probes import (
    NotApplicable,
    agree,
    askable,
    compare_with_fresh,
    finite,
    gradients,
    need,
    same,
    seeded,
    some,
    sources,
    tokens,
    told,
)
from attnzoo.testing.size import size

SHORT, LONG = 2, 33
SEPARATE, FUSED = ("q_proj", "k_proj", "v_proj"), "qkv_proj"


def check_calls_change_no_later_call(make: Maker) -> None:
    """No call changes how a later one computes, be it short, long, padded, or in training."""
    attn = make()
    for length in (SHORT, size.length, 1, LONG, size.length):
        x, key_mask = tokens(attn, length), some(size.batch, length, seed=2)
        for given in ({}, {"key_mask": key_mask}, {}):
            with torch.random.fork_rng(devices=[]):
                attn.train()(x, **given)
            agree(attn.eval()(x, **given), make()(x, **given), f"{length} tokens, against a module without a past")


def check_no_tensor_is_kept(make: Maker) -> None:
    """A call leaves no tensor on the module, and its state dict as it was; so does asking for weights or what is
    visible."""
    attn = make(training=True, dropout=0.1)
    tensors, state = _tensors(attn), {name: tuple(value.shape) for name, value in attn.state_dict().items()}
    for length in (SHORT, LONG, size.length):
        attn(tokens(attn, length), key_mask=some(size.batch, length, seed=2))
        attn.eval()(tokens(attn, length), **askable(attn, mask=some(length, length, seed=3)))
        if "cache" in attn.supports:
            attn(tokens(attn, length), cache=attn.new_cache(size.batch, length))
        _ask(attn, length)
        attn.train()
    new = sorted(set(_tensors(attn)) - set(tensors))
    assert not new, f"after calls the module holds tensors that it did not hold before: {', '.join(new)}"
    after = {name: tuple(value.shape) for name, value in attn.state_dict().items()}
    assert after == state, f"calls changed the state dict from {state} to {after}"


def _ask(attn: Attention, length: int) -> None:
    """Asks for all that is there to be asked."""
    attn.visible(length)
    if "weights" in attn.supports:
        weights = attn.weights(tokens(attn, length), key_mask=some(size.batch, length, seed=2))
        kind = dtype_of(attn)
        assert weights.dtype == kind, f"weights of {kind} tokens are {weights.dtype}"


def _tensors(attn: Attention) -> list[str]:
    """Where a module holds tensors, each with its identity; `grad` aside."""
    found: list[str] = []
    seen: set[int] = set()

    def walk(value: Any, place: str) -> None:
        if isinstance(value, Tensor):
            found.append(f"{place} ({list(value.shape)}, {id(value)})")
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}.{key}")
        elif isinstance(value, list | tuple | set | frozenset):
            for number, inner in enumerate(value):
                walk(inner, f"{place}[{number}]")
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            walk(vars(value), place)

    walk(attn, type(attn).__name__)
    return found


def check_inference_mode_does_not_stick(make: Maker) -> None:
    """A module that was first used in inference mode trains and computes the same afterwards."""
    used, fresh, length = make(), make(), LONG + 1  # a length that no other check has
    x = tokens(used, length).requires_grad_()
    with torch.inference_mode():
        first = used(x.detach(), key_mask=some(size.batch, length, seed=2))
        used.visible(length)
        cache = used.new_cache(size.batch, length) if "cache" in used.supports else None
        if cache is not None:
            used(x[:, :3].detach(), cache=cache)
    agree(used(x, key_mask=some(size.batch, length, seed=2)), first, "after inference mode, against in it")
    right = gradients(fresh.train(), seeded(fresh, fresh, x), x=x)
    for name, gradient in gradients(used.train(), seeded(used, used, x), x=x).items():
        agree(gradient, right[name], f"after inference mode: gradient of {name}")
    if cache is not None:
        used.eval()
        agree(used(x[:, 3:], cache=cache), used(x)[:, 3:], "a cache from inference mode, used outside it")


def check_moving_does_not_stick(make: Maker) -> None:
    """A module that was used on another device or in another dtype, or made on the meta device, where sizes beyond
    2 ** 31 elements are fine, computes and trains the same afterwards."""
    attn = make()
    if torch.cuda.is_available():
        x = tokens(attn)
        agree(attn.to("cuda")(x.to("cuda")).cpu(), attn.cpu()(x), "on a GPU", 1e-6)
    attn.float()(tokens(attn).float())
    attn.double().load_state_dict(make().state_dict())
    compare_with_fresh(attn, make, "after it was used in float32")
    with torch.device("meta"):
        attn = make()
    for length in (size.length, 2**17) if "length_free" in attn.supports else (size.length,):
        shape = list(attn(tokens(attn, length, batch=1).to("meta")).shape)
        assert shape == [1, length, attn.d_model], f"{length} tokens on the meta device give {shape}"
    attn.to_empty(device="cpu").load_state_dict(make().state_dict())
    compare_with_fresh(attn, make, "after it was on the meta device")


def check_inputs_are_not_modified(make: Maker) -> None:
    """Inputs and masks are the same after a call as before it."""
    attn = make(training=True, dropout=0.1)
    given = {
        "key_mask": some(size.batch, size.length, seed=2),
        "mask": some(size.batch, attn.num_heads, size.length, size.length, seed=4),
        **told(attn),
    }
    calls: list[dict[str, Tensor]] = [{"x": tokens(attn), **askable(attn, **given)}]
    if "cross" in attn.supports:
        calls.append({"x": tokens(attn), **sources(attn), "key_mask": some(size.batch, size.context, seed=2)})
    for call in calls:
        before = {name: tensor.clone() for name, tensor in call.items()}
        with torch.no_grad():
            attn(**call)
        attn(**call)
        for name, tensor in before.items():
            same(call[name], tensor, f"{name} after a call, against before it")


def check_state_dict_round_trip(make: Maker) -> None:
    """A state dict loads strictly into another module, whatever lengths both saw, and makes it compute the same."""
    attn, other = make(), make(start=1)
    need(attn, "length_free")
    attn(tokens(attn, LONG))
    other(tokens(other, SHORT))
    file = io.BytesIO()
    torch.save(attn.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for length in (size.length, LONG + 3):
        same(other(tokens(attn, length)), attn(tokens(attn, length)), f"{length} tokens after loading a state dict")
    for name, value in other.state_dict().items():
        same(value, attn.state_dict()[name], f"{name} after loading a state dict")


def check_other_layout_loads(make: Maker) -> None:
    """A fused module loads a separate state dict and the other way round, strictly, and computes the same."""
    attn, other = make(), make(start=1)
    state = attn.state_dict()
    layers = {name for name, _ in attn.named_children()}
    narrow = attn.num_kv_heads * attn.head_dim
    swapped = {name: value for name, value in state.items() if name.split(".")[0] not in (*SEPARATE, FUSED)}
    for kind in {name.split(".")[-1] for name in state if "_proj." in name}:
        if layers == {FUSED, "out_proj"}:
            rows = state[f"{FUSED}.{kind}"].split([attn.d_model, narrow, narrow])
            swapped |= {f"{name}.{kind}": part for name, part in zip(SEPARATE, rows, strict=True)}
        elif layers == {*SEPARATE, "out_proj"}:
            swapped[f"{FUSED}.{kind}"] = torch.cat([state[f"{name}.{kind}"] for name in SEPARATE])
        else:
            raise NotApplicable(f"its layers are {', '.join(sorted(layers))}")
    other.load_state_dict(swapped)
    same(other(tokens(attn)), attn(tokens(attn)), "after loading a state dict of the other layout")


def check_copies_and_pickles(make: Maker) -> None:
    """A module that has been used can be copied and pickled."""
    attn = make(training=True)
    seeded(attn, attn, tokens(attn)).sum().backward()
    attn.eval()
    y = attn(tokens(attn), key_mask=some(size.batch, size.length, seed=2))
    if "cache" in attn.supports:
        attn(tokens(attn), cache=attn.new_cache(size.batch, size.length))
    _ask(attn, size.length)
    for how, twin in (("deepcopy", copy.deepcopy(attn)), ("pickle", pickle.loads(pickle.dumps(attn)))):
        same(twin(tokens(attn), key_mask=some(size.batch, size.length, seed=2)), y, f"after {how}")
        assert twin.supports == attn.supports, f"after {how} it supports {sorted(twin.supports)}"


def check_converts(make: Maker) -> None:
    """`.half()`, `.bfloat16()` and `.double()` convert a module that has been used, its masks staying what they are."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        attn = make(dtype=torch.float32)
        x, key_mask = tokens(attn), some(size.batch, size.length, seed=2)
        attn(x, key_mask=key_mask)
        kinds = {name: buffer.is_floating_point() for name, buffer in attn.named_buffers()}
        attn.to(dtype)
        assert kinds == {name: buffer.is_floating_point() for name, buffer in attn.named_buffers()}, (
            "buffers changed kind"
        )
        for given in ({}, {"key_mask": key_mask}):
            y = attn(x.to(dtype), **given)
            assert y.dtype == dtype, f"after .to({dtype}) the output is {y.dtype}"
            same(
                y,
                make(dtype=torch.float32).to(dtype)(x.to(dtype), **given),
                f"after .to({dtype}), against a module without a past",
            )


def check_gradient_checkpointing(make: Maker) -> None:
    """Non-reentrant checkpointing gives the same output and gradients, with dropout and with a frozen input."""
    for dropout in (0.0, 0.3):
        for needed in (True, False):
            attn = make(training=True, dropout=dropout)
            x, given = tokens(attn).requires_grad_(needed), {"key_mask": some(size.batch, size.length, seed=2)}
            inputs = {"x": x} if needed else {}
            y = seeded(attn, attn, x, **given)
            right = gradients(attn, y, **inputs)
            again = seeded(attn, lambda x, **masks: checkpoint(attn, x, use_reentrant=False, **masks), x, **given)  # noqa: B023
            what = f"checkpointed, dropout={dropout}, {'with' if needed else 'without'} a gradient of x"
            same(again, y, what)
            for name, gradient in gradients(attn, again, **inputs).items():
                agree(gradient, right[name], f"{what}: gradient of {name}")


def check_every_parameter_learns(make: Maker) -> None:
    """Every parameter gets a gradient in an ordinary training step, so that plain DDP works."""
    for given in ({}, {"key_mask": some(size.batch, size.length, seed=2)}):
        attn = make(training=True, dropout=0.1)
        attn(tokens(attn), **given).square().mean().backward()
        for name, parameter in attn.named_parameters():
            assert parameter.grad is not None, f"{name} gets no gradient"
            finite(parameter.grad, f"gradient of {name}")
