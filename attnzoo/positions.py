"""Where tokens stand when hidden ones do not count, and rotary embeddings at those places."""

import torch
from torch import Tensor

from attnzoo.shapes import Positions, Queries


def count_visible(length: int, key_mask: Tensor | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """The position of each token, [1 or b, t]: how many visible tokens of its document come before it."""
    if key_mask is None and documents is None:
        return torch.arange(length, device=device)[None]
    if key_mask is None:
        assert documents is not None
        key_mask = torch.ones_like(documents, dtype=torch.bool)
    if documents is None:
        return (key_mask.cumsum(-1) - key_mask.long()).clamp(min=0)
    order = documents.argsort(dim=-1, stable=True)  # brings the tokens of a document together, in their order
    grouped, visible = documents.gather(-1, order), key_mask.gather(-1, order).long()
    before = visible.cumsum(-1) - visible
    first = torch.arange(length, device=device) == 0
    opens = first | (grouped != grouped.roll(1, -1))
    start = before.masked_fill(~opens, 0).cummax(-1).values
    return torch.empty_like(before).scatter_(-1, order, before - start)


def rotate(x: Queries, positions: Positions, width: int | None = None, base: float = 10_000.0) -> Queries:
    """Turns feature pair (i, i + d/2) of each head by position * base ** (-2 i / d), so that q @ k depends on
    distance alone; d is `width` where heads hold several vectors of that width, else all features.

    Source: Su et al. 2021, section 3.2.2, arXiv:2104.09864, with the halves as pairs, as Llama has them.
    """
    x = x.unflatten(-1, (-1, width or x.shape[-1]))  # [b h t n d]
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision can't tell far positions apart
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angles = positions[:, None, :, None, None].to(wide) * frequencies  # [b 1 t 1 d/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)
