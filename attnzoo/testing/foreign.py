"""A module that is no Attention, in the place of one, so that the contract can be asked of anybody's."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.attention import Attention
from attnzoo.cache import Cache
from attnzoo.errors import CacheError, MaskError, NotSupportedError, OptionError
from attnzoo.formulas import parse
from attnzoo.patterns import Causal, Full, Pattern

REFUSALS = (ValueError, TypeError, AssertionError, RuntimeError, KeyError, IndexError, ArithmeticError)


class Refused(OptionError, MaskError, CacheError, NotSupportedError):
    """Whatever a module of somebody else's raises: it stands for the error that the contract asks for."""


class NotTaken(Refused):
    """A call with an argument that a module's `forward` does not have: there is nothing to be asked then."""


class Foreign(Attention):
    """An nn.Module with the `forward` of an Attention, or a part of it.

    What it supports is read from the parameters of its `forward`, less its attribute `without`. Its attribute
    `pattern` (a pattern or a formula) says what its queries may look at; else that is everything, or under causal
    everything before. Its attribute `close` is the tolerance of float64 comparisons, for a module that computes in
    float32 whatever its dtype; `backward = False` says that it has none here. What it gives for queries that key_mask
    hides is not looked at, as nobody does.

    Args:
        given: the options it was built with.
    Raises:
        OptionError: nothing says what is right: neither a method `expected` nor projections of the usual names.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.sizes = {"d_model": given["d_model"], "num_heads": given["num_heads"]}
        self.sizes["num_kv_heads"] = given.get("num_kv_heads") or getattr(module, "num_kv_heads", given["num_heads"])
        own = getattr(module, "pattern", Full())
        pattern: Pattern = parse(own) if isinstance(own, str) else own
        causal = given.get("causal", False)
        self.pattern = pattern & Causal() if causal and not pattern.causal else pattern
        self.dropout, self.positions, self.score = 0.0, given.get("positions", "none"), None
        self.without = frozenset(getattr(module, "without", ()))  # type: ignore[misc]
        parameters = inspect.signature(module.forward).parameters
        self.takes = frozenset(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self.takes |= {*inspect.signature(Attention.forward).parameters}  # it says that it takes anything
        self.backward = bool(getattr(module, "backward", True))
        self.supports = self._supported() - self.without
        if not hasattr(module, "expected") and not has_usual_layers(self):
            raise OptionError(
                f"nothing says what {type(module).__name__} should compute: give it a method expected(x, ...) that "
                "takes what forward takes and computes it plainly, or projections q_proj, k_proj, v_proj and out_proj"
            )

    @property
    def d_model(self) -> int:
        return self.sizes["d_model"]

    @property
    def num_heads(self) -> int:
        return self.sizes["num_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.sizes["num_kv_heads"]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    def forward(self, x: Tensor, context: Tensor | None = None, **call: Any) -> Tensor:
        given = {name: value for name, value in {"context": context, **call}.items() if value is not None}
        if missing := [name for name in given if name not in self.takes]:
            raise NotTaken(f"its forward takes no {' nor '.join(missing)}")
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.backward):
                y = self.module(x, **given)
        except REFUSALS as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        assert isinstance(y, Tensor), f"forward gives a {type(y).__name__}, and a tensor [b, q, e] is right"
        return without_hidden(y, **given)

    def expected(self, x: Tensor, context: Tensor | None = None, **call: Any) -> Tensor:  # type: ignore[override]
        """What a call must give, by the module's own definition."""
        given = {name: value for name, value in {"context": context, **call}.items() if value is not None}
        return without_hidden(self.module.expected(x, **given), **given)  # type: ignore[operator]

    def new_cache(self, batch_size: int, max_length: int, rewind: int = 0) -> Cache:
        if "cache" not in self.supports:
            raise Refused("it has no cache")
        return self.module.new_cache(batch_size, max_length)  # type: ignore[operator]

    def weights(self, *_: Any, **__: Any) -> Tensor:
        raise Refused("weights are asked of an Attention alone")

    def _supported(self) -> set[str]:
        found = {"causal" if self.causal else "bidirectional", "right_padding", "length_free", "compile", "export"}
        found |= {name for name in ("documents", "marked") if name in self.takes}
        found |= {"left_padding"} if self.pattern.relative else set()
        found |= {"cross"} if "context" in self.takes else set()
        if "cache" in self.takes and hasattr(self.module, "new_cache") and self.pattern.decodes:
            found.add("cache")
        return found


def without_hidden(y: Tensor, key_mask: Tensor | None = None, cache: Any = None, **given: Any) -> Tensor:
    """The output of a call with zero for hidden queries, where queries and keys are the same tokens."""
    if key_mask is None or cache is not None or "context" in given or "values" in given:
        return y
    return y.masked_fill((key_mask == 0)[:, :, None], 0) if key_mask.shape == y.shape[:2] else y


def bare(attn: Attention) -> Any:
    """The module itself: where projections live, and where tracing must see nothing else."""
    return attn.module if isinstance(attn, Foreign) else attn


def has_usual_layers(attn: Attention) -> bool:
    """Whether it has the projections, separate or fused, under the names that all variants share."""
    usual = {"q_proj", "k_proj", "v_proj", "out_proj"}, {"qkv_proj", "out_proj"}
    if isinstance(attn, Foreign):
        return any(all(hasattr(attn.module, name) for name in names) for names in usual)
    return {name for name, _ in attn.named_children()} in usual
