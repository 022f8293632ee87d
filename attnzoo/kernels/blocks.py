"""Sparse attention in blocks: what the pattern can't reach is never computed."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import NotSupportedError
from attnzoo.kernels.dense import dense, without_autocast
from attnzoo.kernels.plan import plan
from attnzoo.kernels.products import Call, attend, gradients
from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Values

MASKS = ("key_mask", "mask", "documents", "marked")


def blocks(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention over the blocks of keys that the pattern touches.

    A plan, remembered for a pattern and a length, cuts the call into parts: some queries with all the keys that they
    may look at. There are first derivatives only. Where `applies` says no, and over the keys that a window's cache has
    kept, all scores are computed.

    Cost: O(p d) time for p pairs in the touched blocks; O((q + k) h d) memory, and a fixed amount for the part.
    """
    if scope.gaps or not applies(q, k) or _learns_elsewhere(scope):
        return dense(q, k, v, scope)
    parameters: list[Tensor] = list(scope.score.parameters()) if isinstance(scope.score, torch.nn.Module) else []
    made = plan(scope, q.shape[1], k.shape[1], block, q.device)
    seed = int(torch.randint(2**62, (), device="cpu")) if scope.dropout else 0
    return _Blocks.apply(q, k, v, Call(made, scope, seed), *parameters)


def applies(q: Tensor, k: Tensor) -> bool:
    """Whether there is something to plan, and numbers to plan with: not in a graph, nor under torch.func."""
    level = getattr(torch._C._functorch, "maybe_current_level", None)  # torch has no public way to ask
    transformed = level is not None and level() is not None
    plain = type(q) in (Tensor, torch.nn.Parameter) and not q.is_meta and not transformed
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return plain and not traced and q.numel() > 0 and k.shape[2] > 0


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        # Masks are saved so that torch notices a change meanwhile.
        ctx.save_for_backward(q, k, v, *(getattr(call.scope, name) for name in MASKS), *parameters)
        ctx.call = call
        return attend(q, k, v, call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph: what is computed again here has no derivative of its own
            raise NotSupportedError("attention in blocks has first derivatives only: use a dense variant for more")
        q, k, v, *saved = ctx.saved_tensors
        masks, saved = dict(zip(MASKS, saved, strict=False)), saved[len(MASKS) :]
        parameters = [x.detach().requires_grad_(need) for x, need in zip(saved, ctx.needs_input_grad[4:], strict=True)]
        scope = _with_parameters(dataclasses.replace(ctx.call.scope, **masks), parameters)
        with without_autocast(grad):
            of_q, of_k, of_v, *others = gradients(grad, q, k, v, ctx.call._replace(scope=scope), parameters)
        return (of_q, of_k, of_v, None, *others)


def _with_parameters(scope: Scope, parameters: Sequence[Tensor]) -> Scope:
    """The scope with a score that computes with these parameters, whatever its module holds by now."""
    score: Any = scope.score
    if not isinstance(score, torch.nn.Module):
        return scope
    # A copy, as other threads may use the module; all its tensors but parameters are shared.
    held = [
        *score.buffers(),
        *(x for module in score.modules() for x in vars(module).values() if isinstance(x, Tensor)),
    ]
    memo = {id(tensor): tensor for tensor in held}
    memo |= {id(old): new for old, new in zip(score.parameters(), parameters, strict=True)}
    made: Any = copy.deepcopy(score, memo)
    return dataclasses.replace(scope, score=made)


def _learns_elsewhere(scope: Scope) -> bool:
    """Whether gradients go through the score to other tensors than its parameters, which only `dense` gives them."""
    if scope.score is None or getattr(scope.score, "by_place", False) or not torch.is_grad_enabled():
        return False
    parameters = scope.score.parameters() if isinstance(scope.score, torch.nn.Module) else ()
    score = _with_parameters(scope, [parameter.detach() for parameter in parameters]).score
    assert score is not None
    device = scope.key.index.device
    place = scope.place(torch.zeros(1, 1, 1, dtype=torch.long, device=device), scope.query.head[:1])
    return score(torch.zeros(1, 1, 1, 1, device=device), place, place).requires_grad
