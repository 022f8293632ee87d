"""Sparse attention in blocks: what the pattern can't reach is never computed."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.errors import NotSupportedError
from attnzoo.kernels.dense import dense, without_autocast
from attnzoo.kernels.plan import plan
from attnzoo.kernels.products import Call, attend, gradients
from attnzoo.scope import Scope
from attnzoo.scores import Score
from attnzoo.shapes import Heads, Keys, Queries, Values

MASKS = ("key_mask", "mask", "documents", "marked")


def blocks(q: Queries, k: Keys, v: Values, scope: Scope, block: int = 64) -> Heads:
    """Attention over the blocks of keys that the pattern touches.

    A plan, remembered for a pattern and a length, cuts the call into parts: some queries with all the keys that they
    may look at. There are first derivatives only. Where `applies` says no, all scores are computed.

    Cost: O(p d) time for p pairs in the touched blocks; O((q + k) h d) memory, and a fixed amount for the part.
    """
    if not applies(q, k):
        return dense(q, k, v, scope)
    parameters: list[Tensor] = list(scope.score.parameters()) if isinstance(scope.score, torch.nn.Module) else []
    made = plan(scope, q.shape[1], k.shape[1], block, q.device)
    seed = int(torch.randint(2**62, ())) if scope.dropout else 0
    return _Blocks.apply(q, k, v, Call(made, scope, seed), *parameters)


def applies(q: Tensor, k: Tensor) -> bool:
    """Whether there is something to plan, and numbers to plan with: not in a graph, nor under torch.func."""
    level = getattr(torch._C._functorch, "maybe_current_level", None)  # torch has no public way to ask
    transformed = level is not None and level() is not None
    plain = type(q) in (Tensor, torch.nn.Parameter) and not q.is_meta and not transformed
    return plain and not torch.compiler.is_compiling() and q.numel() > 0 and k.shape[2] > 0


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


def _with_parameters(scope: Scope, parameters: list[Tensor]) -> Scope:
    """The scope with a score that computes with these parameters, whatever its module holds by now."""
    if not parameters:
        return scope
    module = cast(torch.nn.Module, scope.score)
    named = dict(zip((name for name, _ in module.named_parameters()), parameters, strict=True))
    score = cast(Score, lambda *call: torch.func.functional_call(module, named, call))
    return dataclasses.replace(scope, score=score)
