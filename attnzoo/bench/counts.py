"""What has to be computed: visible pairs, FLOPs and bytes, and how fast this machine multiplies matrices."""

import functools
import math
import time

import torch

from attnzoo.attention import Attention
from attnzoo.bench.problem import Problem
from attnzoo.patterns import Pattern
from attnzoo.shapes import Place, Span

RUN = 64  # tokens that are looked at together

FORWARD = 4
"""FLOPs a pair and feature: a product and a sum for the score, and for the value."""
BOTH = 14
"""The same with backward: the forward pass, the scores once more, and four products for the gradients."""


@functools.lru_cache(maxsize=64)
def visible_pairs(pattern: Pattern, queries: int, keys: int, heads: int) -> int:
    """How many pairs the pattern lets see each other over all heads, queries at the end of the keys.

    Cost: runs of tokens that all see each other, or none, are counted at once; the rest one by one.
    """
    rows, columns = _runs(keys - queries, keys), _runs(0, keys)
    standing = Span(rows.first[:, None], rows.last[:, None])
    found = 0
    for number in range(heads if pattern.per_head else 1):
        head = torch.tensor(number)
        size = (len(rows.first), len(columns.first))
        touched = pattern.touches(standing, columns, head).expand(size)
        covered = pattern.covers(standing, columns, head).expand(size) & touched
        tokens = (standing.last - standing.first + 1) * (columns.last - columns.first + 1)
        found += int((tokens * covered).sum())
        for row, column in zip(*(part.split(4096) for part in (touched & ~covered).nonzero().unbind(1)), strict=True):
            query, key = (_tokens(span, index) for span, index in ((rows, row), (columns, column)))
            real = (query <= rows.last[row, None])[:, :, None] & (key <= columns.last[column, None])[:, None]
            seen = pattern.sees(Place(query[:, :, None], head), Place(key[:, None], head)) & real
            found += int(seen.sum())
    return found if pattern.per_head else found * heads


def _runs(start: int, stop: int) -> Span:
    first = torch.arange(start, stop, RUN)
    return Span(first, (first + RUN).clamp(max=stop) - 1)


def _tokens(span: Span, index: torch.Tensor) -> torch.Tensor:
    return span.first[index, None] + torch.arange(RUN)


def flops(problem: Problem, attn: Attention, pairs: int) -> int:
    """FLOPs that nobody can save: those of the visible pairs, and of the projections at module level."""
    step = BOTH if problem.mode == "both" else FORWARD
    found = problem.batch * pairs * step * problem.head_dim
    if problem.level == "module":
        weights = 2 * attn.d_model * (attn.d_model + attn.num_kv_heads * attn.head_dim)
        found += problem.batch * problem.queries * weights * 2 * (3 if problem.mode == "both" else 1)
    return found


def least_bytes(problem: Problem, attn: Attention) -> int:
    """Bytes that have to move: q, k, v and the output once, and backward q, k, v, the output and all gradients."""
    size = problem.torch_dtype.itemsize * problem.head_dim * problem.batch
    q, kv = attn.num_heads * problem.queries * size, attn.num_kv_heads * problem.length * size
    return 2 * q + 2 * kv + ((4 * q + 4 * kv) if problem.mode == "both" else 0)


def matrix_rate(dtype: torch.dtype, device: str, seconds: float = 1.0) -> float:
    """FLOPs a second of a matrix product: the best found within some seconds.

    Raises:
        RuntimeError: the device has no product in this dtype.
    """
    size, best, end = 512, math.inf, time.perf_counter() + seconds
    largest = 1024 if device == "cpu" else 8192
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(a, b)
            if device != "cpu":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / size**3)
            if time.perf_counter() > end:
                return 2 / best
        size = min(2 * size, largest)
