"""What a variant refuses, and that it does what it declares."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attnzoo.errors import NotSupportedError, OptionError
from attnzoo.registry import FEATURES, WAIVABLE
from attnzoo.testing.foreign import Foreign
from attnzoo.testing.maker import Maker
from attnzoo.testing.probes import (
    NotApplicable,
    documents_of,
    marked_of,
    refuses,
    takes,
    tokens,
)
from attnzoo.testing.size import size


def check_impossible_heads_are_refused(make: Maker) -> None:
    """Impossible head counts are an OptionError when the module is built."""
    odd = () if isinstance(make(), Foreign) else (True, 2.0)  # what only we refuse
    for heads in (0, -1, *odd, 5, 48):
        refuses(OptionError, f"num_heads={heads!r} of d_model=24", make, num_heads=heads, naming=("num_heads", heads))
    if "num_kv_heads" in make.accepts:
        for groups in (0, -1, *odd, 4, 2 * size.heads):
            what = f"num_kv_heads={groups!r} of num_heads={size.heads}"
            refuses(OptionError, what, make, num_kv_heads=groups, naming=("num_kv_heads", groups))


def check_impossible_options_are_refused(make: Maker) -> None:
    """Options that mean nothing are an OptionError when the module is built."""
    if missing := {"dropout", "positions", "bias"} - make.accepts:
        raise NotApplicable(f"it has no option {' nor '.join(sorted(missing))}")
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
    shown = (
        attn.visible(size.length) if not attn.redraws else torch.zeros(1, size.length, size.length, dtype=torch.bool)
    )
    assert not (make.causal and shown.triu(1).any()), "built with causal=True it shows what comes later"
    wrong = attn.supports & {names[not make.causal]} or {names[make.causal]} - attn.supports
    assert not wrong, f"built with causal={make.causal} it supports {sorted(attn.supports)}"
    other = names[not make.causal]
    if "causal" not in make.accepts:
        return
    try:
        Maker(make.factory, make.options, not make.causal)()
    except OptionError as error:
        assert other in attn.without, f"it is not declared to be without '{other}', and refuses it: {error}"
    else:
        assert other not in attn.without, f"it is declared to be without '{other}', and can be built so"


def check_features_are_what_is_declared(make: Maker) -> None:
    """What a variant supports works, and what it does without is a NotSupportedError; so is a cache with a context."""
    attn = make()
    unknown = (attn.supports | attn.without) - set(FEATURES)
    assert not unknown, f"no feature is named {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}"
    kept = attn.without - set(WAIVABLE)
    assert not kept, f"{', '.join(sorted(kept))} can't be done without, as `without` says; only {', '.join(WAIVABLE)}"
    x = tokens(attn)
    uses: list[tuple[str, Callable[[], object]]] = [
        ("cross", lambda: attn(x, tokens(attn, size.context))),
        ("documents", lambda: attn(x, documents=documents_of(size.batch, size.length))),
        ("marked", lambda: attn(x, marked=marked_of(size.batch, size.length))),
        ("cache", lambda: attn.new_cache(size.batch, size.length)),
    ]
    if takes(attn, "values"):
        uses.append(("cross", lambda: attn(x, values=x)))
    cache = _cache_of_any(make)
    if cache is not None and "cache" not in attn.supports:
        uses.append(("cache", lambda: attn(x, cache=cache)))
    elif cache is not None and takes(attn, "context"):
        refuses(NotSupportedError, "a cache and context", lambda: attn(x, x, cache=cache))
    if not attn.redraws:
        uses.append(("weights", lambda: attn.weights(x)))
    for feature, use in uses:
        if feature not in attn.supports:
            refuses(NotSupportedError, f"{feature}, which is not among what it supports", use)
            continue
        try:
            use()
        except NotSupportedError as error:
            raise AssertionError(f"{feature} is among what it supports, and it refuses: {error}") from error


def _cache_of_any(make: Maker) -> Any:
    """A cache from any causal setting of the variant that has one."""
    with contextlib.suppress(OptionError, NotSupportedError):
        return dataclasses.replace(make, causal=True)().new_cache(size.batch, size.length)
