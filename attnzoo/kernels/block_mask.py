"""Which blocks of scores FlexAttention computes, and for which of them it need not ask the pattern."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnzoo.kernels.plan import TABLE, may_share, runs, table
from attnzoo.patterns import Pattern
from attnzoo.scope import Scope

TILE = 128  # tokens a block: others don't fit all of torch's kernels
FINER = (16, 32, 64)  # blocks of a pattern that are asked for one by one, as larger runs would seem to touch everything


def block_mask(scope: Scope, heads: int, block: int, device: torch.device) -> BlockMask:
    """The blocks that a call touches, without a `mask_mod`; remembered by value where its tensors say no more."""
    lengths = (scope.query_length, scope.key_length)
    call = (scope.pattern, lengths, heads, block, device, scope.pattern_alone)
    with torch.device("cpu"):  # whatever the default device is
        if scope.documents is None and not scope.own_pattern:
            return copy.copy(_remembered(*call))
        return _made(*call, scope)


@functools.lru_cache(maxsize=64)
def _remembered(*call: Any) -> BlockMask:
    with torch.inference_mode(False), torch.no_grad():
        return _made(*call)


def _made(
    pattern: Pattern, lengths: tuple[int, int], heads: int, block: int, device: torch.device, pattern_alone: bool,
    scope: Scope | None = None,
) -> BlockMask:  # fmt: skip
    queries, keys = lengths
    touched, whole = (x.to(device, non_blocking=True)[None] for x in _tables(pattern, lengths, heads, block, scope))
    if scope is not None and scope.documents is not None:
        tiles, blocks = runs(keys - queries, keys, TILE), runs(0, keys, TILE)
        touched = touched & may_share(scope.documents, tiles, blocks)[:, None]
    if not pattern_alone:  # then each block must be asked for
        return BlockMask.from_kv_blocks(*_ordered(touched), None, None, TILE, seq_lengths=lengths)
    return BlockMask.from_kv_blocks(*_ordered(touched & ~whole), *_ordered(whole), TILE, seq_lengths=lengths)


def _tables(
    pattern: Pattern, lengths: tuple[int, int], heads: int, block: int, scope: Scope | None
) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each tile of queries touches, and which it sees whole, both [1 or h, nq, nk]."""
    queries, keys = lengths
    size = block if block in FINER else TILE
    heads = heads if pattern.per_head else 1
    columns = runs(0, keys, size, scope)
    step = TILE * max(1, TABLE * size // (heads * len(columns.first) * TILE))
    touched: list[Tensor] = []
    whole: list[Tensor] = []
    for start in range(keys - queries, keys, step):
        rows = runs(start, min(start + step, keys), size, scope)
        any_seen, all_seen = table(pattern, rows, columns, heads)
        touched.append(_joined(any_seen, TILE // size, Tensor.any))
        whole.append(_joined(all_seen, TILE // size, Tensor.all))
    seen_whole = torch.cat(whole, 1)
    seen_whole[:, queries // TILE :] = False  # torch takes no block for whole that reaches beyond the end
    seen_whole[:, :, keys // TILE :] = False
    return torch.cat(touched, 1), seen_whole


def _joined(table: Tensor, times: int, join: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A table [h, n, m] for runs that are so many times as long."""
    table = F.pad(table, (0, -table.shape[2] % times, 0, -table.shape[1] % times))
    return join(join(table.unflatten(2, (-1, times)).unflatten(1, (-1, times)), 4), 2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are chosen, [b, h, n], and their numbers before those of the others, [b, h, n, m]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()
