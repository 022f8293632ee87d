# ruff: noqa: F401, PLE0604
"""A zoo of attention variants behind one registry, each proven by one contract."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnzoo import testing
    from attnzoo.attention import Attention, attend
    from attnzoo.cache import Cache
    from attnzoo.errors import (
        AttnzooError,
        CacheError,
        InputError,
        MaskError,
        NameTakenError,
        NotSupportedError,
        OptionError,
        RecipeError,
        UnknownVariantError,
    )
    from attnzoo.patterns import Causal, Full, Global, Heads, Local, Marked, Pattern, Random
    from attnzoo.registry import build, describe, find, list_variants, register

__version__ = "0.1.0"

_HOMES = {
    "attention": ("Attention", "attend"),
    "cache": ("Cache",),
    "errors": (
        "AttnzooError",
        "CacheError",
        "InputError",
        "MaskError",
        "NameTakenError",
        "NotSupportedError",
        "OptionError",
        "RecipeError",
        "UnknownVariantError",
    ),
    "patterns": ("Causal", "Full", "Global", "Heads", "Local", "Marked", "Pattern", "Random"),
    "registry": ("build", "describe", "find", "list_variants", "register"),
    "testing": ("testing",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, so that `attnzoo --help` loads no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'attnzoo' has no attribute '{name}'")
    module = importlib.import_module(f"attnzoo.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
