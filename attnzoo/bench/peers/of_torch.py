"""What torch itself has."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention import Attention
from attnzoo.bench.peers.pattern import mask_of, parts
from attnzoo.bench.peers.peer import Peer, Unfit
from attnzoo.bench.problem import Problem
from attnzoo.patterns import Causal, Full, Global, Local, Random
from attnzoo.shapes import Place


class Sdpa(Peer):
    """`scaled_dot_product_attention` with the cheapest mask that says the pattern."""

    def prepare(self, attn: Attention, problem: Problem) -> None:
        pattern = attn.current_pattern()
        self.causal = pattern == Causal() and problem.queries > 1
        self.shared = attn.num_kv_heads != attn.num_heads
        self.mask = None if pattern in (Full(), Causal()) else mask_of(attn, problem)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, enable_gqa=self.shared)


class Dense(Sdpa):
    """The same over all pairs, or over all before: what a sparse pattern saves work against."""

    baseline = True

    def prepare(self, attn: Attention, problem: Problem) -> None:
        self.causal, self.mask = attn.causal and problem.queries > 1, None
        self.shared = attn.num_kv_heads != attn.num_heads
        length = problem.length
        self.pairs = attn.num_heads * (length * (length + 1) // 2 if self.causal else problem.queries * length)


class SdpaRepeat(Sdpa):
    """The same with keys and values repeated for each query head."""

    def prepare(self, attn: Attention, problem: Problem) -> None:
        super().prepare(attn, problem)
        if not self.shared:
            raise Unfit("is for key-value heads that query heads share")
        self.shared, self.group = False, attn.num_heads // attn.num_kv_heads

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(q, *(x.repeat_interleave(self.group, dim=1) for x in (k, v)))


class Flex(Peer):
    """`flex_attention`, compiled, with a block mask made beforehand."""

    compiles = True

    def prepare(self, attn: Attention, problem: Problem) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if problem.device == "cpu" and problem.mode == "both":
            raise Unfit("has no backward on CPU")
        pattern, queries, keys = attn.current_pattern(), problem.queries, problem.length
        blocks = [part.block for part in parts(pattern) if isinstance(part, Local | Global | Random) and part.block > 1]
        heads = attn.num_heads if pattern.per_head else None
        table = mask_of(attn, problem) if blocks else None

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if table is not None:  # a table, for what its compiler makes no code of; whole blocks never look there
                return table[head if pattern.per_head else 0, query, key]
            return pattern.sees(Place(query + keys - queries, head), Place(key, head))

        self.mask = None
        if pattern != Full():
            size = blocks[0] if blocks else 128
            self.mask = create_block_mask(sees, None, heads, queries, keys, problem.device, size)
        self.shared = attn.num_kv_heads != attn.num_heads
        self.compiled = torch.compile(flex_attention)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = self.compiled(q, k, v, block_mask=self.mask, enable_gqa=self.shared)
        assert isinstance(out, Tensor)
        return out


class MultiheadAttention(Peer):
    """`nn.MultiheadAttention`, weights not asked."""

    whole_module = True
    grouped = False
    modes = ("forward", "both")

    def prepare(self, attn: Attention, problem: Problem) -> None:
        state, pattern = separate(attn), attn.current_pattern()
        bias = attn.out_proj.bias is not None
        self.module = nn.MultiheadAttention(attn.d_model, attn.num_heads, bias=bias, batch_first=True)
        with torch.no_grad():
            for kind in ("weight", "bias") if bias else ("weight",):
                joined = torch.cat([state[f"{name}_proj.{kind}"] for name in "qkv"])
                getattr(self.module, f"in_proj_{kind}").copy_(joined)
                getattr(self.module.out_proj, kind).copy_(state[f"out_proj.{kind}"])
        self.module.to(problem.device, problem.torch_dtype).train(problem.mode == "both")
        self.mask = None
        if pattern != Full():
            hidden = ~mask_of(attn, problem)  # True hides
            self.mask = hidden.repeat(problem.batch, 1, 1) if pattern.per_head else hidden[0]

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.module(x, x, x, attn_mask=self.mask, need_weights=False)[0]

    def parameters(self) -> Sequence[Tensor]:
        return list(self.module.parameters())


def separate(attn: Attention) -> dict[str, Tensor]:
    """The weights as four layers have them."""
    state = {name: tensor.detach() for name, tensor in attn.named_parameters()}
    for kind in ("weight", "bias"):
        fused = state.pop(f"qkv_proj.{kind}", None)
        if fused is not None:
            names = (f"{name}_proj.{kind}" for name in "qkv")
            state |= dict(zip(names, fused.split(attn.projection.rows), strict=True))
    return state
