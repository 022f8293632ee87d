"""The definition: softmax over the visible keys, with every score written out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from attnzoo.scope import Scope
from attnzoo.shapes import Heads, Keys, Queries, Scores, Values


def dense(q: Queries, k: Keys, v: Values, scope: Scope) -> Heads:
    """Attention over all keys with a b h q k matrix of weights; softmax and sums in float32 at least.

    Cost: O(h q k d) time, O(h q k) memory.
    """
    visible = None if scope.all_visible else scope.visible()
    weights = F.dropout(dense_weights(q, k, scope, visible), scope.dropout)
    grouped = weights.unflatten(1, (v.shape[1], -1))  # values are never repeated
    heads = einsum(grouped, v.to(weights.dtype), "b g r q k, b g k f -> b g r q f")
    return heads.flatten(1, 2).to(v.dtype)


def dense_weights(q: Queries, k: Keys, scope: Scope, visible: Tensor | None) -> Scores:
    """The weight of each key for each query; `visible` broadcasts to [b, h, q, k], None for all."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = (q.to(wide) * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # keys are never repeated
    scores = einsum(grouped, k.to(wide), "b g r q d, b g k d -> b g r q k").flatten(1, 2)
    if scope.score is not None:
        scores = scope.score(scores, scope.query, scope.key)
    return masked_softmax(scores, visible)


def masked_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the visible keys, all of them where None; a row without any is zero, and so are its gradients.

    The lowest finite score stands for hidden ones: minus infinity would make an empty row NaN, in backward even
    after a repair.
    """
    if visible is None:
        return scores.softmax(-1)
    hidden = ~visible
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keeps autocast out of a kernel, which chooses its own dtypes."""
    kind = tensor.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()
