"""Builds the module under test: fresh and small, with the same weights each time."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attnzoo.attention import Attention
from attnzoo.errors import OptionError
from attnzoo.options import check, options

D_MODEL, NUM_HEADS = 24, 6  # with num_kv_heads = 2, tiling and repeating heads differ


@dataclasses.dataclass(frozen=True)
class Maker:
    """A variant with one set of options in one causal setting; calling it builds the module.

    Checks get one of these, and say by keyword what they need to be different.
    """

    factory: Callable[..., Attention]
    options: Mapping[str, Any]
    causal: bool

    def __call__(
        self, *, dtype: torch.dtype = torch.float64, training: bool = False, start: int = 0, **overrides: Any
    ) -> Attention:
        """A fresh module, in eval mode and float64 unless asked otherwise.

        Args:
            start: which random start the weights have; equal ones make equal weights.
            overrides: options that differ from the maker's own.
        """
        given = self._given(overrides)
        check(self.factory, given)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)
            attn = self.factory(**given)
        return attn.to(dtype).train(training)

    @property
    def accepts(self) -> frozenset[str]:
        """The options that the variant's signature has."""
        return frozenset(options(self.factory))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {**self.options, "causal": self.causal}.items())

    def _given(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        given = {"d_model": D_MODEL, "num_heads": NUM_HEADS, "causal": self.causal, **self.options, **overrides}
        own = self.options.get("num_kv_heads")
        if own and "num_heads" in overrides and "num_kv_heads" not in overrides and type(given["num_heads"]) is int:
            given["num_kv_heads"] = math.gcd(own, given["num_heads"])
        return given


def makers(factory: Callable[..., Attention], options: Mapping[str, Any]) -> list[Maker]:
    """The causal settings in which a variant builds with these options, or the one that the options themselves ask for.

    Raises:
        OptionError: it builds in none.
    """
    rest = {name: value for name, value in options.items() if name != "causal"}
    settings = [options["causal"]] if "causal" in options else [False, True]
    found, problem = [], ""
    for make in (Maker(factory, rest, causal) for causal in settings):
        try:
            make()
        except OptionError as error:  # a setting that it does without, or options that fit nothing
            problem = str(error)
            continue
        except Exception:  # not ours to judge here: the checks will fail with it
            pass
        found.append(make)
    if not found:
        raise OptionError(f"it can't be built with {dict(options)}, causal or not: {problem}")
    return found
