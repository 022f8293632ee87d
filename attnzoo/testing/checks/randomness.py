"""What is random, and when: promises 10 and 11."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from attnzoo.errors import NotSupportedError
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    NotApplicable,
    agree,
    askable,
    differ,
    gradients,
    need_dropout,
    noise,
    refuses,
    same,
    seeded,
    some,
    tokens,
)
from attnzoo.testing.size import CLOSE, size

LONG = 33


def check_patterns_are_fixed(make: Maker) -> None:
    """What a query may look at is the same at every call, at every length, in every module, and after loading."""
    attn, other = make(), make(start=1)
    shown = attn.visible(LONG)
    for length in (1, 2, size.length, LONG - 1):
        corner = shown[:, :length, :length]
        assert torch.equal(attn.visible(length), corner), f"visible({length}) is not the corner of visible({LONG})"
    x = tokens(attn, LONG)
    y = attn(x)
    same(attn(x), y, "a second call")
    torch.manual_seed(1)
    other.load_state_dict(attn.state_dict())
    assert torch.equal(other.visible(LONG), shown), "a second module shows another pattern"
    same(other(x), y, "a second module with the same weights, under another global seed")


def check_random_state_is_left_alone(make: Maker) -> None:
    """No global random state is read or advanced, in eval nor, without dropout or redraw, in training; building draws
    weights from torch's generator and touches no other."""
    for training in (False, True):
        mode, outputs = "training" if training else "eval", []
        attn = make(training=training, dropout=0.0 if training else 0.3)
        if attn.redraws:
            continue
        x, given = tokens(attn), {"key_mask": some(size.batch, size.length, seed=2)}
        for seed in (0, 1):
            before = _seeded(seed)
            attn.visible(size.length)
            outputs.append(attn(x, **given))
            for generator, state in _states().items():
                assert state == before[generator], f"a call in {mode} advanced the global random state of {generator}"
        same(outputs[0], outputs[1], f"in {mode} under two global seeds")
    drawn = []
    for seed in (0, 1):
        before = _seeded(seed)
        make.factory(**make.given({}))
        for generator in ("NumPy", "random"):
            assert _states()[generator] == before[generator], f"building changed the random state of {generator}"
        drawn.append(torch.rand(4))
    differ(drawn[0], drawn[1], "what torch draws after building under two global seeds: building has seeded it")


def _seeded(seed: int) -> dict[str, object]:
    """All global random states after they were seeded; `run` puts back what they were."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return _states()


def _states() -> dict[str, object]:
    numpy: Any = np.random.get_state()
    return {"torch": torch.get_rng_state().tolist(), "NumPy": numpy[1].tolist(), "random": random.getstate()}


def check_redrawn_patterns(make: Maker) -> None:
    """A pattern that is drawn anew in training comes from torch's generator, so that checkpoints see the same."""
    attn = make(training=True)
    if not attn.redraws:
        raise NotApplicable("it draws no pattern anew")
    refuses(NotSupportedError, "visible() in training, under redraw", attn.visible, size.length)
    refuses(NotSupportedError, "weights() in training, under redraw", attn.weights, tokens(attn))
    x = tokens(attn).requires_grad_()
    y = seeded(attn, attn, x)
    same(seeded(attn, attn, x), y, "the same global seed twice")
    assert any(not torch.equal(attn(x), y) for _ in range(5)), "five steps in training all drew the same pattern"
    right = gradients(attn, y, x=x)
    for name, gradient in gradients(
        attn, seeded(attn, lambda x: checkpoint(attn, x, use_reentrant=False), x), x=x
    ).items():
        agree(gradient, right[name], f"checkpointed with a redrawn pattern: gradient of {name}")
    attn.eval()
    same(attn(x), make()(x), "in eval after training, against a module that never trained")


def check_training_changes_no_pattern(make: Maker) -> None:
    """Training and eval compute the same without dropout, except where redraw or train_only ask otherwise."""
    if make.options.get("redraw") or make.options.get("train_only"):
        raise NotApplicable("redraw and train_only make training different")
    attn = make()
    x = tokens(attn)
    shown, y = attn.visible(size.length), attn(x)
    attn.train()
    assert torch.equal(attn.visible(size.length), shown), "visible() differs between training and eval"
    agree(attn(x), y, "in training without dropout, against eval")


def check_dropout_is_for_training(make: Maker) -> None:
    """Dropout is there in training, and only then."""
    need_dropout(make)
    attn, without = make(dropout=0.5), make()
    x, given = (
        tokens(attn),
        askable(attn, key_mask=some(size.batch, size.length, seed=2), mask=some(size.length, size.length, seed=3)),
    )
    for masks in ({}, given):
        same(attn.eval()(x, **masks), without(x, **masks), "in eval with dropout=0.5, against dropout=0")
        attn.train()
        for how, call in (
            ("a call", attn),
            ("a checkpointed call", lambda x, **m: checkpoint(attn, x, use_reentrant=False, **m)),
        ):
            torch.manual_seed(0)
            one = call(x, **masks)
            same(seeded(attn, call, x, **masks), one, f"{how} in training twice with one global seed")
            other = call(x, **masks)
            assert not torch.equal(one, other), (
                f"{how} with dropout=0.5 gives the same in training twice: nothing is dropped"
            )


def check_dropout_keeps_the_mean(make: Maker) -> None:
    """What dropout leaves is scaled up, so that the mean stays."""
    need_dropout(make)
    draws, length = 400, 6
    attn, without = make(dropout=0.5, training=True), make(training=True)
    x = tokens(attn, length, batch=1)
    y = seeded(attn, attn, x.repeat(draws, 1, 1)).detach()
    right = seeded(without, without, x)[0].detach()
    deviation = y.std(0) / draws**0.5
    off = (y.mean(0) - right).abs()
    worst = float((off - 6 * deviation).max())
    assert worst <= 1e-9, (
        f"the mean of {draws} draws is {float(off.max()):.3g} off, and the standard error {float(deviation.max()):.2g}"
    )


def check_dropout_is_the_same_in_backward(make: Maker) -> None:
    """Backward drops the weights that forward dropped."""
    need_dropout(make)
    if make.close > CLOSE:
        raise NotApplicable("float32 is too coarse for differences")
    attn = make(dropout=0.5, training=True)
    x, step = tokens(attn).requires_grad_(), noise(size.batch, size.length, attn.d_model, seed=8) * 1e-5
    weight = noise(size.batch, size.length, attn.d_model, seed=9)
    (gradient,) = torch.autograd.grad((seeded(attn, attn, x) * weight).sum(), x)
    up, down = ((seeded(attn, attn, x.detach() + way * step) * weight).sum() for way in (1, -1))
    slope, right = (up - down) / 2, (gradient * step).sum()
    agree(slope, right, "slope of the loss along a direction, against its gradient", 1e-6 * float(right.abs()) + 1e-12)
