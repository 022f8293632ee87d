"""FlexAttention: kernels that torch compiles from the pattern itself, on a GPU."""

import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attnzoo.kernels.block_mask import TILE, block_mask
from attnzoo.kernels.blocks import blocks
from attnzoo.scope import Scope
from attnzoo.scores import Alibi
from attnzoo.shapes import Heads, Keys, Place, Queries, Values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = range(16, 129)  # features of a head: the least that a GPU multiplies, the most that each GPU has memory for
LEAST = 2**20  # pairs of a sequence from which on compiling pays


def flex(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention by `flex_attention`, over the blocks of keys that the pattern touches.

    A pattern is compiled for its first length, batch size and number of blocks, and once more where one of these first
    changes; anew for other heads, widths, dtypes and kinds of masks, and with gradients. Where torch fails to, `blocks`
    computes it, after a warning. On a CPU, which is for tests, all scores are computed, and no gradients.

    Args:
        block: tokens that the pattern is asked about at once, best those of its own blocks.
    Cost: O(p d) time for p pairs in the touched blocks; O((q + k) h d) memory.
    """
    mask, offset = block_mask(scope, q.shape[1], block, q.device), None
    if scope.query_length != scope.key_length:
        offset = torch.full((), scope.key_length - scope.query_length, device=q.device)
    mask.mask_mod = _sees(scope, offset)
    score_mod = None if scope.score is None else _alibi(_slopes(q.shape[1], q.dtype, q.device), offset)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    widths = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    facts = (q[:, 0, 0, 0], scope.key_mask, scope.mask, scope.documents, scope.marked, scope.query.salt, offset)
    single = tuple(None if x is None else tuple(size == 1 for size in x.shape) for x in facts)
    variation = (q.device, q.dtype, scope.pattern, scope.score, learns, widths, single)
    if variation not in _given_up:
        try:
            return _compiled(*variation)(q, k, v, score_mod, mask)
        except torch._dynamo.exc.TorchDynamoException as error:
            _given_up.add(variation)
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"torch can't compile {scope.pattern} here, so blocks compute it: {reason}", stacklevel=2)
    return blocks(q, k, v, scope, block)


def serves(device: str, dtype: torch.dtype, sizes: tuple[int, int, int], widths: tuple[int, int], scope: Scope) -> bool:
    """Whether FlexAttention computes such a call, and the call is worth compiling for.

    Args:
        device: the type of the device.
        sizes: heads, queries and keys.
        widths: features of a head of queries and of values.
    """
    heads, queries, keys = sizes
    able = device == "cuda" and dtype in DTYPES and all(width in WIDTHS for width in widths)
    known = scope.score in (None, Alibi(heads)) and not scope.dropout
    return able and known and queries >= TILE and queries * keys >= LEAST


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether torch can compile for this GPU."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.lru_cache(maxsize=256)
def _compiled(device: torch.device, *_variation: Any) -> Callable[..., Tensor]:
    """FlexAttention, compiled for one variation of calls."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: BlockMask
    ) -> Tensor:
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=q.shape[1] != k.shape[1])

    # Torch counts compilations by code and name, gives up after eight, and takes numbers that change for variables,
    # while the radius of a window is better a constant: so each variation has a name of its own.
    attend.__code__ = attend.__code__.replace(co_name=f"flex_{next(_numbers)}")
    return torch.compile(attend, fullgraph=True, backend="eager" if device.type == "cpu" else "inductor")


_numbers = itertools.count()
_given_up: set[tuple[Any, ...]] = set()  # variations that torch failed to compile


def _sees(scope: Scope, offset: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What may be looked at, as FlexAttention asks it: for one query and one key."""
    pattern, marked, salt = scope.pattern, scope.marked, scope.query.salt
    key_mask, mask, documents = scope.key_mask, scope.mask, scope.documents

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        head, row, column = h.long(), q_idx.long(), kv_idx.long()  # random patterns compute with 64 bits
        row = row if offset is None else row + offset
        query = Place(row, head, None if marked is None else marked[b, row], salt)
        key = Place(column, head, None if marked is None else marked[b, column], salt)
        seen = pattern.sees(query, key)
        if key_mask is not None:
            seen = seen & key_mask[b, column]
        if documents is not None:
            seen = seen & (documents[b, row] == documents[b, column])
        if mask is not None:
            axes = zip((b, h, q_idx, kv_idx), mask.shape, strict=True)
            seen = seen & mask[tuple([axis if size > 1 else torch.zeros_like(axis) for axis, size in axes])]
        return seen

    return sees


def _alibi(slopes: Tensor, offset: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The score term as FlexAttention asks for it, which makes no tensors, so that slopes are given."""

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = q_idx if offset is None else q_idx + offset
        return score - slopes[h] * (row - kv_idx).abs()

    return alibi


@functools.lru_cache(maxsize=64)
def _slopes(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(Alibi(heads).slopes(), dtype=torch.promote_types(dtype, torch.float32), device=device)
