"""What a variant refuses, and that it does what it declares."""

import torch

from attnzoo.errors import NotSupportedError, OptionError
from attnzoo.registry import FEATURES
from attnzoo.testing.maker import NUM_HEADS, Maker
from attnzoo.testing.probes import (
    BATCH,
    CONTEXT,
    LENGTH,
    NotApplicable,
    documents_of,
    refuses,
    tokens,
)


def check_impossible_heads_are_refused(make: Maker) -> None:
    """Impossible head counts are an OptionError when the module is built."""
    for heads in (0, -1, True, 2.0, 5, 48):
        refuses(OptionError, f"num_heads={heads!r} of d_model=24", make, num_heads=heads, naming=("num_heads", heads))
    if "num_kv_heads" in make.accepts:
        for groups in (0, -1, True, 2.0, 4, 2 * NUM_HEADS):
            what = f"num_kv_heads={groups!r} of num_heads={NUM_HEADS}"
            refuses(OptionError, what, make, num_kv_heads=groups, naming=("num_kv_heads", groups))


def check_impossible_options_are_refused(make: Maker) -> None:
    """Options that mean nothing are an OptionError when the module is built."""
    for name, value in (
        ("dropout", -0.1),
        ("dropout", 1.5),
        ("dropout", "much"),
        ("positions", "rotery"),
        ("bias", "no"),
    ):
        refuses(OptionError, f"{name}={value!r}", make, **{name: value}, naming=(name,))


def check_causal_is_what_was_asked_for(make: Maker) -> None:
    """Both causal settings can be built, or the one that can't is declared to be done without."""
    attn = make()
    names = {True: "causal", False: "bidirectional"}
    assert attn.causal == make.causal, f"built with causal={make.causal} it says causal={attn.causal}"
    shown = attn.visible(LENGTH) if not attn.redraws else torch.zeros(1, LENGTH, LENGTH, dtype=torch.bool)
    assert not (make.causal and shown.triu(1).any()), "built with causal=True it shows what comes later"
    wrong = attn.supports & {names[not make.causal]} or {names[make.causal]} - attn.supports
    assert not wrong, f"built with causal={make.causal} it supports {sorted(attn.supports)}"
    other = names[not make.causal]
    try:
        Maker(make.factory, make.options, not make.causal)()
    except OptionError as error:
        assert other in attn.without, f"it is not declared to be without '{other}', and refuses it: {error}"
    else:
        assert other not in attn.without, f"it is declared to be without '{other}', and can be built so"


def check_features_are_what_is_declared(make: Maker) -> None:
    """What a variant supports works, and what it does without is a NotSupportedError."""
    attn = make()
    unknown = (attn.supports | attn.without) - set(FEATURES)
    assert not unknown, f"no feature is named {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}"
    x = tokens(attn)
    calls = {
        "cross": [lambda: attn(x, tokens(attn, CONTEXT)), lambda: attn(x, values=x)],
        "documents": [lambda: attn(x, documents=documents_of(BATCH, LENGTH))],
        "cache": [lambda: attn.new_cache(BATCH, LENGTH)],
    }
    for feature, uses in calls.items():
        for use in uses:
            if feature not in attn.supports:
                refuses(NotSupportedError, f"{feature}, which is not among what it supports", use)
                continue
            try:
                use()
            except NotSupportedError as error:
                raise AssertionError(f"{feature} is among what it supports, and it refuses: {error}") from error


def check_cache_is_refused_where_it_means_nothing(make: Maker) -> None:
    """`new_cache` without causal, and a cache together with a context, are a NotSupportedError."""
    attn = make()
    x = tokens(attn)
    if not make.causal:
        refuses(NotSupportedError, "new_cache without causal", attn.new_cache, BATCH, LENGTH)
        other = Maker(make.factory, make.options, True)
        try:
            cache = other().new_cache(BATCH, LENGTH)
        except (OptionError, NotSupportedError):
            return  # no cache to be had
        refuses(NotSupportedError, "a cache without causal", attn, x, cache=cache)
    elif "cache" in attn.supports:
        cache = attn.new_cache(BATCH, LENGTH)
        refuses(NotSupportedError, "a cache and context", attn, x, x, cache=cache)
        refuses(NotSupportedError, "a cache and values", attn, x, values=x, cache=cache)
    else:
        raise NotApplicable("it does without a cache")
