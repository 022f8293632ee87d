"""A call of attention computed part by part: matrix products, softmax, and their gradients.

Parts share their memory, so no matrix of all pairs ever exists, and gradients compute the weights again. Scores,
softmax and sums over parts have float32 at least; other products of bfloat16 are bfloat16.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.kernels.parts import Part
from attnzoo.kernels.plan import Plan
from attnzoo.scope import Scope


class Call(NamedTuple):
    """What is computed, and the seed of what dropout drops."""

    plan: Plan
    scope: Scope
    seed: int = 0


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The heads [b, h, q, f], laid out as tokens are, so that joining them copies nothing."""
    queries, (q, k, v) = q.shape[2], _cut(call.plan, q, k, v)
    make = q.new_empty if call.plan.complete else q.new_zeros
    out = make(len(q), q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    for chosen, some in _sequences(q, k, v, call):
        of_some = out[chosen]
        for number, part in enumerate(call.plan.parts):
            weights = some.weights(number, part)
            part.put(of_some, weights.of_seeing(_over_keys(part, some.lean(weights.dropped), part.keys(some.v))))
    return out[:, :, :queries]


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of q, k, v and the score's parameters."""
    queries, keys, scale = q.shape[2], k.shape[2], q.shape[-1] ** -0.5
    (grad,), (q, k, v) = _cut(call.plan, grad), _cut(call.plan, q, k, v)
    of_q = torch.empty_like(q) if call.plan.complete else torch.zeros_like(q)
    of_k, of_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
    of_parameters: list[Tensor | None] = [None] * len(parameters)
    for chosen, some in _sequences(q, k, v, call):
        above, some_q, some_k, some_v = grad[chosen].to(some.v.dtype), of_q[chosen], of_k[chosen], of_v[chosen]
        for number, part in enumerate(call.plan.parts):
            weights = some.weights(number, part, parameters)
            rows = weights.of_seeing(part.queries(above))
            some.add(part, some_v, some.lean(weights.dropped), rows)
            of_weights = some.widened("of weights, wide", some.products(part, "of weights", rows, part.keys(some.v)))
            if weights.kept is not None:
                of_weights = of_weights * weights.kept
            of_scores = some.memory("of scores", weights.values.shape, some.wide)
            mean = torch.mul(of_weights, weights.values, out=of_scores).sum(-1, keepdim=True)
            torch.sub(of_weights, mean, out=of_scores).mul_(weights.values)
            if weights.shaped is not None:
                of_scores, found = weights.through_score(of_scores, parameters)
                of_parameters = [_sum(old, new) for old, new in zip(of_parameters, found, strict=True)]
            narrow = some.lean(of_scores)
            part.put(some_q, _over_keys(part, narrow, weights.keys).mul_(scale))
            some.add(part, some_k, narrow, weights.queries)
    of_k, of_v = of_k.mul_(scale).to(k.dtype)[:, :, :keys], of_v.to(v.dtype)[:, :, :keys]
    given = zip(parameters, of_parameters, strict=True)
    learned = (torch.zeros_like(parameter) if of_it is None else of_it for parameter, of_it in given)
    return [of_q[:, :, :queries], of_k, of_v, *learned]


def _cut(plan: Plan, queries: Tensor, *keys: Tensor) -> list[Tensor]:
    """Heads [b, h, t, d] as parts read them: filled up to whole tiles and blocks where they do, or else as they are."""
    found = []
    for x, size in zip((queries, *keys), (plan.size[0], *len(keys) * (plan.size[1],)), strict=True):
        missing = -x.shape[2] % size if plan.whole_blocks else 0
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        found.append(x.contiguous() if plan.whole_blocks or len(x) > 1 else x)
    return found


class Weights(NamedTuple):
    """The weights [x, m, keys] of a part; `empty` [x, m, 1] says which rows see nothing, `kept` what dropout leaves."""

    queries: Tensor  # what they were computed from, as the part reads it
    keys: list[Tensor]
    values: Tensor
    empty: Tensor | None
    kept: Tensor | None
    raw: Tensor | None  # scores before the score term, and after it, where gradients go through it
    shaped: Tensor | None

    @property
    def dropped(self) -> Tensor:
        return self.values if self.kept is None else self.values * self.kept

    def of_seeing(self, rows: Tensor) -> Tensor:
        """Rows [x, m, d], zero where they see nothing."""
        return rows if self.empty is None else rows.masked_fill(self.empty, 0)

    def through_score(self, of_scores: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of the products of queries and keys, and of the score's parameters."""
        assert self.raw is not None
        assert self.shaped is not None
        asked = [self.raw, *(parameter for parameter in parameters if parameter.requires_grad)]
        found = iter(torch.autograd.grad(self.shaped, asked, of_scores.view_as(self.shaped), allow_unused=True))
        of_products = next(found)
        of_products = torch.zeros_like(of_scores) if of_products is None else of_products.reshape(of_scores.shape)
        return of_products, [next(found) if parameter.requires_grad else None for parameter in parameters]


class _Sequences:
    """Some sequences of a call, in the dtype of its products; `memory` is used again by each part."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope, seed: int, held: dict[str, Tensor]) -> None:
        self.scope, self.seed, self.held, self.wide = scope, seed, held, _wide(q)
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.scale = q.shape[-1] ** -0.5
        dtype = q.dtype if q.dtype == torch.bfloat16 else self.wide  # float16 would overflow in gradients
        self.q, self.k, self.v = q.to(dtype), k.to(dtype), v.to(dtype)

    def memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for one use at a time: fresh memory of this size costs as much as a product."""
        found = self.views.get((name, shape))
        if found is None:
            size = math.prod(shape)
            if name not in self.held or self.held[name].numel() < size:
                self.views.clear()  # they would hold what is smaller
                self.held[name] = torch.empty(size, dtype=dtype, device=self.q.device)
            found = self.views[name, shape] = self.held[name][:size].view(shape)
        return found

    def lean(self, x: Tensor) -> Tensor:
        """In the dtype of the products."""
        return x if x.dtype == self.q.dtype else self.memory("lean", x.shape, self.q.dtype).copy_(x)

    def widened(self, name: str, x: Tensor) -> Tensor:
        """In the dtype of sums: an operation on two dtypes would do this too, in fresh memory."""
        return x if x.dtype == self.wide else self.memory(name, x.shape, self.wide).copy_(x)

    def products(self, part: Part, name: str, rows: Tensor, keys: list[Tensor]) -> Tensor:
        """Each row [x, m, d] with each key of the part's runs: [x, m, keys]."""
        out = self.memory(name, (*rows.shape[:2], part.shape[2]), rows.dtype)
        for columns, run in zip(part.split(out), keys, strict=True):
            torch.bmm(rows, run.mT, out=columns)
        return out

    def add(self, part: Part, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Adds to each key of the part the rows [x, m, d] by their weights for it."""
        for run, columns in enumerate(part.split(weights)):
            shape = (len(columns), columns.shape[2], rows.shape[2])
            piece = torch.bmm(columns.mT, rows, out=self.memory(f"keys {run}", shape, rows.dtype))
            part.add(total, run, self.widened(f"keys {run}, wide", piece))

    def weights(self, number: int, part: Part, parameters: Sequence[Tensor] | None = None) -> Weights:
        """Softmax over what may be looked at; with `parameters` for gradients."""
        rows, keys = part.queries(self.q), part.keys(self.k)
        scaled = torch.mul(rows, self.scale, out=self.memory("scaled", rows.shape, self.wide))
        wide = [self.widened(f"wide keys {run}", run_keys) for run, run_keys in enumerate(keys)]
        scores = self.products(part, "scores", scaled, wide)
        by_head = scores.view(-1, *part.shape)
        raw = shaped = None
        if self.scope.score is not None:
            traced = parameters is not None and not getattr(self.scope.score, "by_place", False)
            with torch.set_grad_enabled(traced):
                raw = by_head.detach().requires_grad_(traced)
                last = self.scope.key_length - 1  # no place is beyond it where the last ones are filled up
                places = (self.scope.place(p.index.clamp(max=last), p.head) for p in part.places(scores.device))
                shaped = self.scope.score(raw.clone() if traced else raw, *places)  # it may write to what it gets
            by_head = shaped.detach().to(self.wide, copy=True)
            raw, shaped = (raw, shaped) if traced else (None, None)
        lowest = torch.finfo(self.wide).min
        empties = part.hide(by_head, self.scope, lowest)
        scores = by_head.reshape(scores.shape)
        values = torch.softmax(scores, -1, out=self.memory("weights", scores.shape, self.wide))
        empty = scores.amax(-1, keepdim=True) == lowest if empties else None
        kept = None
        if self.scope.dropout:
            generator = torch.Generator(scores.device).manual_seed(self.seed + number)  # backward must drop the same
            drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
            kept = (drawn >= self.scope.dropout).to(self.wide) / (1 - self.scope.dropout)
        return Weights(rows, keys, values, empty, kept, raw, shaped)


def _sequences(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Iterator[tuple[slice, _Sequences]]:
    """As many sequences at a time as a part's size allows."""
    step = max(1, call.plan.most // max((math.prod(part.shape) for part in call.plan.parts), default=1))
    held: dict[str, Tensor] = {}
    for first in range(0, len(q), step):
        chosen = slice(first, first + step)
        seed = call.seed + first * len(call.plan.parts)
        yield chosen, _Sequences(q[chosen], k[chosen], v[chosen], call.scope.sequences(chosen), seed, held)


def _over_keys(part: Part, weights: Tensor, values: list[Tensor]) -> Tensor:
    """The sum of the values of all runs by weight [x, m, keys]: [x, m, f]."""
    first, *others = zip(part.split(weights), values, strict=True)
    out = torch.bmm(*first)
    for columns, run in others:
        out.baddbmm_(columns, run)
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sum(old: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if old is None else old if more is None else old + more
