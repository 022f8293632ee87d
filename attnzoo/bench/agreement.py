"""Equal work first: outputs and gradients are compared before anything is timed."""

import contextlib
import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.bench import contender
from attnzoo.bench.contender import Contender
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import Problem

DEFINED = 1024
"""Tokens up to which a variant is compared with its definition."""
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.06}
"""Differences that are rounding, as a part of the largest number."""
PAIRS = 0.05
"""Pairs that one who sees others than the subject may have more or fewer, as a part."""


class Unequal(Exception):
    """Two do not do the same work; the message says how."""


def check_definition(problem: Problem) -> None:
    """Compares a variant with its own definition, at the problem's length or a shorter one.

    Raises:
        Unequal: it computes something else.
    """
    small = dataclasses.replace(problem, length=min(problem.length, DEFINED), level="kernel")
    with contextlib.suppress(Unfit):
        found, right = contender.subject(small).results(), contender.definition(small).results()
        _check_same(found, right, small, f"at {small.length} tokens ")


def check_peer(peer: Contender, name: str, subject: Contender, wanted: Mapping[str, Tensor]) -> float:
    """Compares a peer with the variant or, where it sees other pairs, with what these give, and their number.

    Args:
        wanted: the results of the variant.
    Returns: how much its results differ from the variant's, as a part of the largest number.
    Raises:
        Unequal: it computes something else, or more or fewer pairs, and is no mere baseline.
    """
    results = peer.results()
    kernel = peer.kernel
    assert kernel is not None
    if kernel.pairs is None or (kernel.baseline and peer.pairs == subject.pairs):
        _check_same(results, wanted, peer.problem)
    elif not kernel.baseline:
        alone = peer
        if peer.problem.level == "module":
            alone = contender.peer(dataclasses.replace(peer.problem, level="kernel"), name)
        scores = kernel.scores()
        if scores is not None:
            right = own_definition(alone, scores)
            _check_same(alone.results(), right, peer.problem, "by the pairs that it says it sees, ")
        unequal = unequal_pairs(peer.pairs, subject.pairs)
        if unequal:
            raise Unequal(unequal)
    return difference(results, wanted)[0]


def _check_same(results: Mapping[str, Tensor], wanted: Mapping[str, Tensor], problem: Problem, where: str = "") -> None:
    unequal = disagreement(results, wanted, problem.torch_dtype)
    if unequal:
        raise Unequal(where + unequal)


def difference(results: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference as a part of the largest number, and of what; infinite where there is NaN."""
    found = []
    for name, right in wanted.items():
        off, most = (results[name].double() - right.double()).abs(), right.double().abs()
        part = float(off.max()) / max(float(most.max()), 1e-30) if off.numel() else 0.0
        found.append((part if part == part else float("inf"), name))
    return max(found)


def disagreement(results: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """What to say where they are not the same, or nothing."""
    off, name = difference(results, wanted)
    what = name if name == "output" else f"gradient of {name}"
    return f"the {what} differs by {off:.2g} of its largest number" if off > ALLOWED[dtype] else ""


def unequal_pairs(pairs: int, wanted: int) -> str:
    """What to say where one computes more or fewer pairs, or nothing."""
    more = pairs / wanted - 1
    return f"it computes {100 * more:+.1f} % pairs ({pairs:,} to {wanted:,})" if abs(more) > PAIRS else ""


def own_definition(contender: Contender, scores: Tensor) -> dict[str, Tensor]:
    """What is right by the pairs that a contender itself says it sees: dense attention with these added scores."""
    leaves = [
        tensor.detach().unflatten(2, (-1, contender.problem.head_dim)).transpose(1, 2).requires_grad_()
        for tensor in contender.inputs
    ]
    q, k, v = leaves
    out = F.scaled_dot_product_attention(q, k, v, scores.to(q.device, q.dtype))
    if contender.grad is None:
        return {"output": out.detach()}
    grad = contender.grad.unflatten(2, (-1, contender.problem.head_dim)).transpose(1, 2)
    return dict(zip(("output", *"qkv"), (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))
