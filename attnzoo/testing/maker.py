"""Builds the module under test: fresh and small, with the same weights each time."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from attnzoo.attention import Attention
from attnzoo.errors import OptionError
from attnzoo.options import check
from attnzoo.registry import EVERY_VARIANT
from attnzoo.testing.foreign import REFUSALS, Foreign, Refused
from attnzoo.testing.size import CLOSE, size

POSITIONS = ("none", "rotary", "alibi")


@dataclasses.dataclass(frozen=True)
class Maker:
    """A variant with one set of options in one causal setting; calling it builds the module.

    Checks get one of these, and say by keyword what they need to be different. `first` is set for one setting of each
    variant, where checks of what settings can't change are run. `calls` collects what the modules are called with.
    """

    factory: Callable[..., nn.Module]
    options: Mapping[str, Any]
    causal: bool
    first: bool = True
    calls: list[tuple[Any, ...]] | None = None

    def __call__(
        self, *, dtype: torch.dtype = torch.float64, training: bool = False, start: int = 0, **overrides: Any
    ) -> Attention:
        """A fresh module, in eval mode and float64 unless asked otherwise.

        Args:
            start: which random start the weights have; equal ones make equal weights.
            overrides: options that differ from the maker's own; a factory that is no variant's need not take them.
        """
        given = self.given(overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)
            attn = self._built(given)
        if self.calls is not None:
            attn.register_forward_pre_hook(functools.partial(self._saw, given), with_kwargs=True)
        return attn.to(dtype).train(training)

    @property
    def accepts(self) -> frozenset[str]:
        """The options that the variant's signature has."""
        return frozenset(inspect.signature(self.factory).parameters)

    @property
    def close(self) -> float:
        """How far off a result in float64 may be that only took another order of operations."""
        return float(getattr(self.factory, "close", CLOSE))

    @property
    def positions(self) -> tuple[str, ...]:
        """The kinds of positions that it can be built with."""
        return POSITIONS if "positions" in self.accepts else POSITIONS[:1]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {**self.options, "causal": self.causal}.items())

    def given(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """All options for the factory."""
        own = {"d_model": size.d_model, "num_heads": size.heads, "causal": self.causal, **self.options}
        given = {**own, **overrides}
        default = getattr(inspect.signature(self.factory).parameters.get("num_kv_heads"), "default", None)
        groups = self.options.get("num_kv_heads", default if isinstance(default, int) else None)
        if groups and "num_kv_heads" not in overrides and type(given["num_heads"]) is int:
            given["num_kv_heads"] = math.gcd(groups, given["num_heads"])
        optional = {"causal", *overrides}
        return {name: value for name, value in given.items() if name in self.accepts or name not in optional}

    def _built(self, given: dict[str, Any]) -> Attention:
        if self._is_ours():  # another's refuses bad options itself, or doesn't: that is asked
            check(self.factory, given)
        try:
            module = self.factory(**given)
        except REFUSALS as error:
            if self._is_ours() or isinstance(error, OptionError):
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error
        if isinstance(module, Attention):
            return module
        if not isinstance(module, nn.Module):
            raise OptionError(f"it makes a {type(module).__name__}, and an nn.Module is wanted")
        return Foreign(module, {"num_heads": size.heads, "d_model": size.d_model, **given})

    def _is_ours(self) -> bool:
        """Whether it is written for attnzoo, so that it owes attnzoo's errors."""
        if inspect.isclass(self.factory):
            return issubclass(self.factory, Attention)
        return self.accepts >= {*EVERY_VARIANT}

    def _saw(
        self, given: Mapping[str, Any], module: nn.Module, call: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        assert self.calls is not None
        self.calls.append((given, dtype_of(module), module.training, call, dict(named)))


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module; float64 where it has no parameters."""
    return next((parameter.dtype for parameter in module.parameters()), torch.float64)


def makers(factory: Callable[..., nn.Module], options: Mapping[str, Any], first: bool = True) -> list[Maker]:
    """The causal settings in which a variant builds with these options, or the one that the options themselves ask for.

    Args:
        first: whether one of them shall be the first of its variant.
    Raises:
        OptionError: it builds in none.
    """
    taken = inspect.signature(factory).parameters
    if missing := {"d_model", "num_heads"} - {*taken}:
        raise OptionError(
            f"{getattr(factory, '__name__', factory)} does not take {' nor '.join(sorted(missing))}, and the contract "
            "builds every module with d_model and num_heads: put it into a class of a few lines that does"
        )
    rest = {name: value for name, value in options.items() if name != "causal"}
    settings = [options["causal"]] if "causal" in options else [True, False]
    if "causal" not in taken:
        settings = [False]
    found: list[Maker] = []
    problem = ""
    for causal in settings:
        make = Maker(factory, rest, causal, first and not found)
        try:
            if make().causal:  # also where nobody could ask for it
                make = dataclasses.replace(make, causal=True)
        except OptionError as error:  # a setting that it does without, or options that fit nothing
            problem = str(error)
            continue
        except Exception:  # not ours to judge here: the checks will fail with it
            pass
        found.append(make)
    if not found:
        raise OptionError(f"it can't be built with {dict(options)}, causal or not: {problem}")
    return found[::-1]
