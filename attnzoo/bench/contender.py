"""What is timed: a variant or a peer, ready to be called again and again on the same inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from attnzoo.attention import Attention
from attnzoo.bench import peers
from attnzoo.bench.counts import visible_pairs
from attnzoo.bench.peers.of_torch import separate
from attnzoo.bench.peers.peer import Peer, Unfit
from attnzoo.bench.problem import Problem
from attnzoo.kernels.dense import without_autocast
from attnzoo.scope import Scope, places


class Contender:
    """One that is measured.

    Args:
        compute: from the inputs to the output.
        inputs: leaves, gradients of which are asked for where the problem has a backward.
        parameters: more of them, whose gradients are computed and not compared.
    """

    def __init__(
        self,
        label: str,
        problem: Problem,
        compute: Callable[..., Tensor],
        inputs: list[Tensor],
        *,
        layout: str = "heads",
        parameters: Sequence[Tensor] = (),
        pairs: int,
        kernel: Peer | None = None,
    ) -> None:
        self.label, self.problem, self.compute, self.pairs = label, problem, compute, pairs
        self.kernel = kernel
        self.difference: float | None = None  # of its output from the variant's, once they were compared
        self.layout = layout if problem.level == "kernel" else "module"
        self.inputs = [_laid_out(tensor, self.layout) for tensor in inputs]
        self.grad: Tensor | None = None
        if problem.mode == "both":
            self.wanted = [tensor.requires_grad_() for tensor in self.inputs] + [*parameters]
            self.grad = _laid_out(_random(inputs[0].shape, problem, seed=1), self.layout)

    def __call__(self) -> tuple[Tensor, ...]:
        """What is measured: one step."""
        if self.grad is None:
            with torch.no_grad():
                return (self.compute(*self.inputs),)
        out = self.compute(*self.inputs)
        return out, *torch.autograd.grad(out, self.wanted, self.grad)

    def results(self) -> dict[str, Tensor]:
        """The output and the gradients of the inputs of one step, in one layout for all."""
        names = ("output", "q", "k", "v") if self.problem.level == "kernel" else ("output", "tokens")
        found = self()[: 1 + len(self.inputs)] if self.grad is not None else self()
        return {name: _heads(tensor, self.layout, self.problem) for name, tensor in zip(names, found, strict=False)}


def subject(problem: Problem) -> Contender:
    """The variant itself.

    Raises:
        Unfit: it has no such mode, or no kernel on plain q, k and v.
    """
    attn = problem.build()
    inputs = make_inputs(problem, attn)
    pairs = visible_pairs(attn.pattern, problem.queries, problem.length, attn.num_heads)
    if problem.level == "kernel":
        return Contender(problem.subject, problem, _kernel(attn, attn.attend), inputs, pairs=pairs)
    compute: Callable[..., Tensor] = attn if problem.mode != "decode" else _decoding(attn, problem)
    return Contender(problem.subject, problem, compute, inputs, parameters=list(attn.parameters()), pairs=pairs)


def definition(problem: Problem) -> Contender:
    """The plain definition of the variant, which says what is right, at kernel level."""
    attn = problem.build()
    inputs = make_inputs(problem, attn)
    return Contender("its definition", problem, _kernel(attn, attn.expected), inputs, pairs=0)


def peer(problem: Problem, name: str) -> Contender:
    """A peer beside the variant.

    Raises:
        Unfit: it can't do the same.
    """
    attn = problem.build()
    if problem.level == "module" and problem.mode == "decode":
        raise Unfit("has no cache here: use --level kernel")
    inputs = make_inputs(problem, attn)
    kernel = peers.find(name)(attn, problem)
    pairs = kernel.pairs
    if pairs is None:
        pairs = visible_pairs(attn.pattern, problem.queries, problem.length, attn.num_heads)
    label, parameters = kernel.label or name, kernel.parameters()
    compute: Callable[..., Tensor] = kernel
    if problem.level == "module" and not kernel.whole_module:
        compute = between = Between(attn, kernel)
        parameters = list(between.parameters())
    return Contender(
        label, problem, compute, inputs, layout=kernel.layout, parameters=parameters, pairs=pairs, kernel=kernel
    )


class Between(nn.Module):
    """A peer's kernel between four linear layers with the weights of the variant."""

    def __init__(self, attn: Attention, kernel: Peer) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({key.replace(".", "_"): w.clone() for key, w in separate(attn).items()})
        self.kernel, self.head_dim = kernel, attn.head_dim

    def forward(self, x: Tensor) -> Tensor:
        projected = [self._linear(f"{name}_proj", x) for name in "qkv"]
        if self.kernel.layout == "heads":
            heads = [tensor.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for tensor in projected]
            return self._linear("out_proj", self.kernel(*heads).transpose(1, 2).flatten(2))
        return self._linear("out_proj", self.kernel(*projected))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}_weight"], self.weights.get(f"{name}_bias"))


def make_inputs(problem: Problem, attn: Attention) -> list[Tensor]:
    """The same random numbers for all: q, k and v [b, h, t, d], or tokens [b, t, e]."""
    if problem.mode == "decode" and "cache" not in attn.supports:
        raise Unfit("can't decode with a cache")
    if problem.level == "module":
        return [_random((problem.batch, problem.queries, attn.d_model), problem)]
    if attn.projection.stored != dict.fromkeys(("keys", "values"), (attn.num_kv_heads, attn.head_dim)):
        raise Unfit("has no plain queries, keys and values: use --level module")
    q = (problem.batch, attn.num_heads, problem.queries, attn.head_dim)
    kv = (problem.batch, attn.num_kv_heads, problem.length, attn.head_dim)
    return [_random(shape, problem, seed=10 + place) for place, shape in enumerate((q, kv, kv))]


def _kernel(attn: Attention, attend: Callable[[Tensor, Tensor, Tensor, Scope], Tensor]) -> Callable[..., Tensor]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = places(attn.num_heads, q.shape[2], k.shape[2], q.device)
        with without_autocast(q):
            return attend(q, k, v, Scope(attn.current_pattern(), query, key, score=attn.score)).to(q.dtype)

    return compute


def _decoding(attn: Attention, problem: Problem) -> Callable[[Tensor], Tensor]:
    """One token against a cache that is one short of the length, and stays so."""
    cache = attn.new_cache(problem.batch, problem.length, rewind=1)
    before = _random((problem.batch, problem.length - 1, attn.d_model), problem, seed=2)
    with torch.no_grad():
        attn(before, cache=cache)

    def compute(x: Tensor) -> Tensor:
        y = attn(x, cache=cache)
        cache.crop(problem.length - 1)
        return y

    return compute


def _random(shape: Any, problem: Problem, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device gets the same
    return torch.randn(shape, generator=generator).to(problem.device, problem.torch_dtype)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    return rearrange(tensor, "b h t d -> b t (h d)").contiguous() if layout == "tokens" else tensor


def _heads(tensor: Tensor, layout: str, problem: Problem) -> Tensor:
    tensor = tensor.detach()
    return rearrange(tensor, "b t (h d) -> b h t d", d=problem.head_dim) if layout == "tokens" else tensor
