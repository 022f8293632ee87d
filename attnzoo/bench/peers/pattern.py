"""A variant's pattern as peers want it: a mask, or the radius of a window."""

import functools

import torch
from torch import Tensor

from attnzoo.attention import Attention
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import Problem
from attnzoo.patterns import Causal, Local, Marked, Pair, Pattern
from attnzoo.shapes import Place


def mask_of(attn: Attention, problem: Problem) -> Tensor:
    """The pattern as a bool mask [1 or h, q, k]."""
    heads = attn.num_heads if attn.pattern.per_head else 1
    return _mask(attn.current_pattern(), problem.queries, problem.length, heads).to(problem.device)


@functools.lru_cache(maxsize=1)
def _mask(pattern: Pattern, queries: int, keys: int, heads: int) -> Tensor:
    seen = torch.empty(heads, queries, keys, dtype=torch.bool)
    query, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    for number in range(heads):  # one at a time: a hash of all pairs takes eight bytes each
        head = torch.tensor(number)
        seen[number] = pattern.sees(Place(query, head), Place(key, head))
    return seen


def radius_of(attn: Attention, problem: Problem, step: int) -> int:
    """The radius of a window, for a peer whose lengths are multiples of `step` radii.

    Raises:
        Unfit: the pattern is no plain window, or the length no multiple.
    """
    pattern = attn.current_pattern()
    window = next((part for part in parts(pattern) if isinstance(part, Local)), None)
    if window is None or window.block != 1 or pattern not in windows(window.radius):
        raise Unfit(f"has windows only, and not {pattern}")
    if problem.length % (step * window.radius):
        raise Unfit(f"wants lengths that are multiples of {step * window.radius}, not {problem.length}")
    return window.radius


def windows(radius: int) -> list[Pattern]:
    """The patterns that a window is written as; no token is marked in a benchmark."""
    plain: list[Pattern] = [Local(radius), Local(radius) | Marked(mutual=True)]
    return [*plain, *(pattern & Causal() for pattern in plain)]


def parts(pattern: Pattern) -> list[Pattern]:
    """The patterns that one is joined from."""
    if isinstance(pattern, Pair):
        return [*parts(pattern.left), *parts(pattern.right)]
    return [pattern]
