"""How tokens become queries, keys and values, and heads become tokens again.

A projection is a frozen value that knows the sizes. The layers it asks for live on the attention itself, under the
names that it looks them up by at each call: state dicts have flat names, and a layer that is replaced (by an
adapter, say) is used.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.errors import OptionError
from attnzoo.options import whole
from attnzoo.shapes import Heads, Keys, Queries, Tokens, Values

SEPARATE = ("q_proj", "k_proj", "v_proj")
GLOBAL = ("q_global_proj", "k_global_proj", "v_global_proj")
FUSED = "qkv_proj"


@dataclasses.dataclass(frozen=True)
class Projection:
    """The sizes of a projection, and what all of them share; head h of h reads key-value head h // (h / g).

    Raises:
        OptionError: the head counts are no whole numbers, do not divide d_model, or do not divide each other.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        whole("d_model", self.d_model)
        whole("num_heads", self.num_heads)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not isinstance(self.bias, bool):
            raise OptionError(f"bias must be True or False, not {self.bias!r}")
        _check_divides("num_heads", self.num_heads, "d_model", self.d_model)
        _check_divides("num_kv_heads", whole("num_kv_heads", self.num_kv_heads), "num_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def groups(self) -> int:
        """The number of key-value heads."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values over all heads, which is also their order where they are fused."""
        return self.d_model, self.groups * self.head_dim, self.groups * self.head_dim

    @property
    def stored(self) -> dict[str, tuple[int, int]]:
        """The heads and features of each entry that a cache stores for a token."""
        return {"keys": (self.groups, self.head_dim), "values": (self.groups, self.head_dim)}

    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, as the attention registers them."""
        raise NotImplementedError

    def adapt(self, state: dict[str, Tensor], prefix: str) -> None:
        """Rewrites a state dict of the other layout in place, so that it loads."""
        raise NotImplementedError

    def queries(self, layers: Any, x: Tokens) -> Queries:
        raise NotImplementedError

    def entries(self, layers: Any, context: Tokens, values: Tokens) -> dict[str, Tensor]:
        """What a cache stores for these tokens, by name, each [b, g, k, d]."""
        raise NotImplementedError

    def self_entries(self, layers: Any, x: Tokens) -> tuple[Queries, dict[str, Tensor]]:
        """Queries and entries of the same tokens."""
        return self.queries(layers, x), self.entries(layers, x, x)

    def keys_values(self, layers: Any, entries: Mapping[str, Tensor]) -> tuple[Keys, Values]:
        """Keys and values from the entries."""
        return entries["keys"], entries["values"]

    def output(self, layers: Any, heads: Heads) -> Tokens:
        """The heads joined to tokens and projected."""
        tokens = heads.transpose(1, 2).flatten(2)  # b q (h f); einops would take longer than the copy for one token
        return layers.out_proj(tokens.contiguous())  # else torch adds the bias in a second rounding

    def split(self, projected: Tokens) -> Queries:
        """Projected features cut into heads."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # b h t d


@dataclasses.dataclass(frozen=True)
class Separate(Projection):
    """Layers of their own for queries, keys and values; fewer key-value heads where asked."""

    def layers(self) -> dict[str, nn.Module]:
        widths = dict(zip((*SEPARATE, "out_proj"), (*self.rows, self.d_model), strict=True))
        return {name: nn.Linear(self.d_model, width, self.bias) for name, width in widths.items()}

    def adapt(self, state: dict[str, Tensor], prefix: str) -> None:
        for kind in ("weight", "bias"):
            fused = state.pop(f"{prefix}{FUSED}.{kind}", None)
            if fused is not None and fused.shape[:1] == (sum(self.rows),):
                for name, part in zip(SEPARATE, fused.split(self.rows), strict=True):
                    state[f"{prefix}{name}.{kind}"] = part.clone()  # else three parameters could share one storage
            elif fused is not None:
                state[f"{prefix}{FUSED}.{kind}"] = fused  # of other sizes: the loader names it

    def queries(self, layers: Any, x: Tokens) -> Queries:
        return self.split(layers.q_proj(x))

    def entries(self, layers: Any, context: Tokens, values: Tokens) -> dict[str, Tensor]:
        return {"keys": self.split(layers.k_proj(context)), "values": self.split(layers.v_proj(values))}


@dataclasses.dataclass(frozen=True)
class WithGlobal(Separate):
    """Layers of their own for global tokens as well: each head holds the ordinary features, then the global ones."""

    @property
    def stored(self) -> dict[str, tuple[int, int]]:
        return {name: (heads, 2 * features) for name, (heads, features) in super().stored.items()}

    def layers(self) -> dict[str, nn.Module]:
        own = (nn.Linear(self.d_model, width, self.bias) for width in self.rows)
        return super().layers() | dict(zip(GLOBAL, own, strict=True))

    def queries(self, layers: Any, x: Tokens) -> Queries:
        return torch.cat([super().queries(layers, x), self.split(layers.q_global_proj(x))], dim=-1)

    def entries(self, layers: Any, context: Tokens, values: Tokens) -> dict[str, Tensor]:
        own = {"keys": layers.k_global_proj(context), "values": layers.v_global_proj(values)}
        ordinary = super().entries(layers, context, values)
        return {name: torch.cat([ordinary[name], self.split(projected)], dim=-1) for name, projected in own.items()}


@dataclasses.dataclass(frozen=True)
class Fused(Projection):
    """One layer for all: rows of `qkv_proj` are all query heads, then all key heads, then all value heads."""

    def layers(self) -> dict[str, nn.Module]:
        return {
            FUSED: nn.Linear(self.d_model, sum(self.rows), self.bias),
            "out_proj": nn.Linear(self.d_model, self.d_model, self.bias),
        }

    def adapt(self, state: dict[str, Tensor], prefix: str) -> None:
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}.{kind}" for name in SEPARATE]
            shapes = [state[name].shape for name in names if name in state]
            if [shape[:1] for shape in shapes] == [(rows,) for rows in self.rows] and len(
                {shape[1:] for shape in shapes}
            ) == 1:
                state[f"{prefix}{FUSED}.{kind}"] = torch.cat([state.pop(name) for name in names])

    def queries(self, layers: Any, x: Tokens) -> Queries:
        return self.split(self._part(layers, x, 0))

    def entries(self, layers: Any, context: Tokens, values: Tokens) -> dict[str, Tensor]:
        return {"keys": self.split(self._part(layers, context, 1)), "values": self.split(self._part(layers, values, 2))}

    def self_entries(self, layers: Any, x: Tokens) -> tuple[Queries, dict[str, Tensor]]:
        q, k, v = layers.qkv_proj(x).split(self.rows, dim=-1)
        return self.split(q), {"keys": self.split(k), "values": self.split(v)}

    def _part(self, layers: Any, x: Tokens, part: int) -> Tensor:
        """One third of what the layer gives: it is called whole, as it may be an adapter and no plain linear."""
        return layers.qkv_proj(x).split(self.rows, dim=-1)[part]


def _check_divides(name: str, part: int, of: str, total: int) -> None:
    if total % part:
        fits = [1, *(size for size in range(max(2, part - 1000), part + 1001) if total % size == 0)]
        near = sorted(sorted(fits, key=lambda size: abs(size - part))[:4])
        raise OptionError(f"{name} = {part} does not divide {of} = {total}; {', '.join(map(str, near))} would")
