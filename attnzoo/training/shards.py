"""Nested values in which a tensor may be cut into parts, one for each process of a training under fsdp."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SHARD = "shard of a tensor"
"""The one key of a dict that stands for a tensor of which this process has a part: consecutive rows."""


def own(value: Any) -> Any:
    """The same with this process's part of each tensor that is cut."""
    if isinstance(value, DTensor):
        return {SHARD: value.to_local().cpu()}
    if isinstance(value, dict):
        return {name: own(inner) for name, inner in value.items()}
    return type(value)(map(own, value)) if isinstance(value, list | tuple) else value


def join(parts: Sequence[Any]) -> Any:
    """The whole of what all processes have parts of; what is not cut is the first one's."""
    first = parts[0]
    if isinstance(first, dict):
        whole = {name: join([part[name] for part in parts]) for name in first}
        return torch.cat([part[SHARD] for part in parts]) if SHARD in first else whole
    if isinstance(first, list | tuple):
        return type(first)(map(join, zip(*parts, strict=True)))
    return first


def fill(value: Any, part: Any) -> Any:
    """A value as `own` took it apart: its cut tensors are overwritten with their parts, the rest is the part's."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            value.to_local().copy_(part[SHARD])
        return value
    if isinstance(part, dict):
        return {name: fill(value[name], inner) for name, inner in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(fill(*pair) for pair in zip(value, part, strict=True))
    return part
