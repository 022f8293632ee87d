"""Which kernel computes a call, and why: the one place where that is chosen."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.blocks import applies, blocks
from attnzoo.kernels.dense import dense
from attnzoo.kernels.flex import compiles, flex, serves
from attnzoo.kernels.fused import fused, remembers
from attnzoo.kernels.operator import blocks_in_graph, takes
from attnzoo.kernels.plan import plan
from attnzoo.patterns import Causal, Full
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Values

DENSE = 0.7  # the share of all scores from which on computing all of them is faster
FEW = 2**19  # scores in all that are computed faster at once than in parts
LEAST_BLOCK = 16  # smaller blocks are there to be tested, and always used


class Choice(NamedTuple):
    """A kernel, and why it is the one."""

    kernel: Literal["dense", "fused", "flex", "blocks", "blocks_in_graph"]
    reason: str


def fastest(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention by the fastest kernel that computes this scope right; all give the same.

    Args:
        block: tokens a block, where it is computed in blocks.
    Cost: that of the kernel; `attnzoo show NAME --shape` says which.
    """
    choice = choose(q, k, v, scope, block)
    if not torch.compiler.is_compiling() and (asked := _asked.get()) is not None:
        asked.append(choice)
        return q.new_zeros(*q.shape[:3], v.shape[3])
    if choice.kernel == "fused":
        return fused(q, k, v, scope)
    if choice.kernel == "flex":
        return flex(q, k, v, scope, block)
    if choice.kernel == "blocks":
        return blocks(q, k, v, scope, block)
    if choice.kernel == "blocks_in_graph":
        return blocks_in_graph(q, k, v, scope, block)
    return dense(q, k, v, scope)


def choose(q: Tensor, k: Tensor, v: Tensor, scope: Scope, block: int = 64) -> Choice:
    """The kernel for a call, from what its scope needs and how large it is."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    if q.numel() == 0 or keys == 0:
        return Choice("dense", "there is nothing to compute")
    plain = scope.pattern in (Full(), Causal()) and (scope.documents is None or queries == 1)
    scores = batch * heads * queries * keys  # compared only outside graphs, which it would bind to some lengths
    drops = scope.dropout > 0 and q.device.type == "cpu" and applies(q, k)  # torch's kernel for CPUs can't
    if plain and scope.score is None and not (drops and scores > FEW):
        return Choice("fused", "the pattern is one that torch's fused attention knows")
    if queries == 1 or scope.gaps:
        reason = "one query, or keys that a cache has kept: all of them in one product"
        return Choice("fused" if scope.score is None else "dense", reason)
    if not applies(q, k):
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and takes(scope, heads):
            return Choice("blocks_in_graph", "a compiled graph calls blocks as an operator")
        return Choice("dense", "here only plain operations work, as in exported programs and under torch.func")
    if serves(q.device.type, q.dtype, (heads, queries, keys), (q.shape[3], v.shape[3]), scope) and compiles(q.device):
        return Choice("flex", "on a GPU FlexAttention skips what the pattern can't reach")
    if plain and scores <= FEW:
        return Choice("dense", "few scores with a term")
    if plain:
        return Choice("blocks", "many scores with a term or dropout: in parts they take no memory")
    if scope.score is None and not scope.dropout and block >= LEAST_BLOCK and remembers(q, k, scope):
        share = plan(scope, heads, k.shape[1], block, q.device).pairs / (heads * queries * keys)
        if share >= DENSE:
            return Choice("fused", f"blocks would compute {share:.0%} of all scores")
    return Choice("blocks", "what the pattern can't reach is not computed")


_asked: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def explained() -> Iterator[list[Choice]]:
    """Within it, `fastest` computes nothing: it adds what it would choose to the list."""
    choices: list[Choice] = []
    before = _asked.set(choices)
    try:
        yield choices
    finally:
        _asked.reset(before)
