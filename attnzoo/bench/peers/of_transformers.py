"""The package transformers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BigBirdConfig, LongformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from attnzoo.attention import Attention
from attnzoo.bench.counts import visible_pairs
from attnzoo.bench.peers.pattern import parts, radius_of
from attnzoo.bench.peers.peer import Peer, Unfit
from attnzoo.bench.problem import Problem
from attnzoo.patterns import Global, Local, Random

CHECKED = 4096  # tokens up to which what BigBird sees is written out to check it


class Longformer(Peer):
    """`LongformerSelfAttention` without global tokens; its `attention_window` is 2 * radius and sees 2 * radius + 1
    keys.
    """

    layout = "tokens"
    modes = ("forward", "both")
    grouped = False

    def prepare(self, attn: Attention, problem: Problem) -> None:
        if attn.causal:
            raise Unfit("looks to both sides always")
        window, length = 2 * radius_of(attn, problem, step=2), problem.length
        config = LongformerConfig(
            hidden_size=attn.d_model, num_attention_heads=attn.num_heads, attention_window=[window],
            attention_probs_dropout_prob=0.0, num_hidden_layers=1,
        )  # fmt: skip
        self.module = LongformerSelfAttention(config, layer_id=0)
        self.given = put_in(self.module)
        real = torch.zeros(problem.batch, length, dtype=problem.torch_dtype, device=problem.device)
        self.masks = {
            "attention_mask": real, "is_index_masked": real < 0, "is_index_global_attn": real > 0,
            "is_global_attn": False,
        }  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        # It scales queries in place, which its own are made for.
        queries, keys, values = self.given
        queries.tensor, keys.tensor, values.tensor = q.transpose(0, 1).clone(), k.transpose(0, 1), v.transpose(0, 1)
        return self.module(q, **self.masks)[0]


class BigBird(Peer):
    """`BigBirdBlockSparseAttention`: blocks of the subject's size, a window of 3, the first and the last one global,
    and as many random blocks as come nearest to the subject's pairs.

    It draws its blocks anew at each call, from NumPy's generator seeded the same, and only in training; in eval all of
    them are block 0. So it is in training here, without dropout. The blocks that it draws are counted: where it draws
    one that its window has too, the pair is computed twice and counts twice.
    """

    layout = "tokens"
    modes = ("forward", "both")
    grouped = False

    def prepare(self, attn: Attention, problem: Problem) -> None:
        found = parts(attn.current_pattern())
        block = next((part.block for part in found if isinstance(part, Local)), 0)
        if {type(part) for part in found} - {Local, Global, Random} or block < 2:
            raise Unfit(f"has a window, global and random blocks, and not {attn.current_pattern()}")
        if problem.length % block or problem.length < 9 * block:
            raise Unfit(f"wants lengths that are multiples of {block}, and at least {9 * block}, not {problem.length}")
        wanted = visible_pairs(attn.pattern, problem.length, problem.length, attn.num_heads)
        blocks = problem.length // block
        near = self._pairs_of(0, blocks) * attn.num_heads * block**2
        draws = round((wanted - near) / ((blocks - 2) * attn.num_heads * block**2))
        draws = max(1, min(draws, (blocks - 6) // 2))
        config = BigBirdConfig(
            hidden_size=attn.d_model, num_attention_heads=attn.num_heads, block_size=block, num_random_blocks=draws,
            attention_probs_dropout_prob=0.0, num_hidden_layers=1,
        )  # fmt: skip
        self.module = BigBirdBlockSparseAttention(config, seed=0).train()
        self.given = put_in(self.module)
        self.block, self.length, self.heads = block, problem.length, attn.num_heads
        self.label = f"hf-bigbird ({draws} random)"
        ones = torch.ones(problem.batch, problem.length, dtype=problem.torch_dtype, device=problem.device)
        names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
        self.masks = dict(zip(names, BigBirdModel.create_masks_for_block_sparse_attn(ones, block), strict=True))
        self.masks["to_blocked_mask"] = self.masks["from_blocked_mask"]
        with torch.no_grad(), recorded(self.module) as self.drawn:
            self(*(ones[..., None].expand(-1, -1, attn.d_model) for _ in range(3)))
        self.pairs = int(self.seen().sum()) * block**2

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        for given, tensor in zip(self.given, (q, k, v), strict=True):
            given.tensor = tensor
        return self.module(q, **self.masks)[0]

    def seen(self) -> Tensor:
        """How often each block of queries computes each block of keys, [h, n, n]."""
        n = self.length // self.block
        row = torch.arange(n)
        near = ((row[:, None] - row).abs() <= 1) | (row == 0) | (row == n - 1)
        near[[0, -1]] = True
        seen = near.int().repeat(self.heads, 1, 1)
        for head, drawn in enumerate(self.drawn):
            rows = row[1:-1, None].expand(n - 2, drawn.shape[1])
            ones = torch.ones(rows.shape, dtype=seen.dtype)
            seen[head].index_put_((rows, drawn[: n - 2].long()), ones, accumulate=True)
        return seen

    def scores(self) -> Tensor | None:
        if self.length > CHECKED:
            return None
        times = self.seen().float().log()  # a pair that counts twice, and minus infinity for none
        return times.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)

    @staticmethod
    def _pairs_of(draws: int, blocks: int) -> int:
        """The blocks that all rows of one head compute."""
        return 2 * blocks + 2 * (4 + draws) + (blocks - 4) * (5 + draws)


class Given(nn.Module):
    """Stands where a projection was, and gives what was put in."""

    tensor: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return self.tensor


def put_in(module: Any) -> tuple[Given, Given, Given]:
    """Takes the projections out of a module."""
    module.query, module.key, module.value = given = Given(), Given(), Given()
    return given


@contextlib.contextmanager
def recorded(module: Any) -> Iterator[list[Tensor]]:
    """Gives a list that is filled with the blocks drawn for each head, [rows, draws], in a call meanwhile."""
    drawn: list[Tensor] = []
    one, every = module._bigbird_block_rand_mask, module._bigbird_block_rand_mask_with_head

    def for_one(*arguments: Any, **named: Any) -> Any:
        blocks = one(*arguments, **named)
        drawn.append(torch.as_tensor(blocks))
        return blocks

    def for_every(**named: Any) -> Any:
        blocks = every(**named)
        drawn.extend(torch.as_tensor(rows) for rows in blocks)
        return blocks

    module._bigbird_block_rand_mask, module._bigbird_block_rand_mask_with_head = for_one, for_every
    yield drawn
    del module._bigbird_block_rand_mask, module._bigbird_block_rand_mask_with_head
