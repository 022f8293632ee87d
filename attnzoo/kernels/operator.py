"""Attention in blocks as an operator of torch, which a compiled graph calls as it is.

A graph holds tensors, numbers and text, so the operator takes the pattern by its formula.
"""

from typing import Any

import torch
from torch import Tensor

from attnzoo.formulas import meaning
from attnzoo.kernels.plan import plan
from attnzoo.kernels.products import Call, attend, gradients
from attnzoo.scope import Scope, places
from attnzoo.scores import Alibi

TENSORS = 9  # of the operator's arguments; the others are settings


def takes(scope: Scope, heads: int) -> bool:
    """Whether the operator can compute a scope: its pattern has a formula, and its score is ALiBi or none."""
    return bool(scope.formula) and scope.score in (None, Alibi(heads))


def blocks_in_graph(q: Tensor, k: Tensor, v: Tensor, scope: Scope, block: int) -> Tensor:
    """What `blocks` computes, for a graph."""
    seed = torch.randint(2**62, (), device="cpu") if scope.dropout else None
    masks = (scope.key_mask, scope.mask, scope.documents, scope.marked)
    return _blocks(
        q, k, v, *masks, scope.query.salt, seed, scope.formula, scope.score is not None, scope.dropout, block
    )  # fmt: skip


@torch.library.custom_op("attnzoo::blocks", mutates_args=())
def _blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, mask: Tensor | None, documents: Tensor | None,
    marked: Tensor | None, salt: Tensor | None, seed: Tensor | None, formula: str, alibi: bool, dropout: float,
    block: int,
) -> Tensor:  # fmt: skip
    call = _call(q, k, (key_mask, mask, documents, marked), salt, seed, formula, alibi, dropout, block)
    return attend(q, k, v, call).transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("attnzoo::blocks_backward", mutates_args=())
def _blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, mask: Tensor | None,
    documents: Tensor | None, marked: Tensor | None, salt: Tensor | None, seed: Tensor | None, formula: str,
    alibi: bool, dropout: float, block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(q, k, (key_mask, mask, documents, marked), salt, seed, formula, alibi, dropout, block)
    of_q, of_k, of_v = (x.contiguous() for x in gradients(grad, q, k, v, call, ()) if x is not None)
    return of_q, of_k, of_v


def _call(
    q: Tensor, k: Tensor, masks: tuple[Tensor | None, ...], salt: Tensor | None, seed: Tensor | None, formula: str,
    alibi: bool, dropout: float, block: int,
) -> Call:  # fmt: skip
    key_mask, mask, documents, marked = masks
    query, key = places(q.shape[1], q.shape[2], k.shape[2], q.device, marked, salt)
    score = Alibi(q.shape[1]) if alibi else None
    scope = Scope(meaning(formula), query, key, key_mask, mask, documents, marked, score, dropout)
    return Call(plan(scope, q.shape[1], k.shape[1], block, q.device), scope, 0 if seed is None else int(seed))


@_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@_blocks_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.settings = inputs[:TENSORS], inputs[TENSORS:]
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = _blocks_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*found, *[None] * (TENSORS - 3 + len(ctx.settings)))


_blocks.register_autograd(_differentiate, setup_context=_save)
